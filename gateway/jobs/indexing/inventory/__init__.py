"""S3 Inventory (S3 User Guide, "Cataloging and analyzing your data with S3 Inventory"): lists of a bucket's objects."""
