"""What there is: the LMDB tables that all worker processes share, and who of it must go when room is needed."""
