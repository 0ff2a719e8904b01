"""A directory as an origin: each directory in it is a bucket, and each file below that an object."""
