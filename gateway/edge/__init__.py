"""HTTP in, S3 operations out: the S3 port."""
