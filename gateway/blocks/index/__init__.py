"""The LMDB tables of blocks, which all worker processes share, and the choice of blocks to evict."""
