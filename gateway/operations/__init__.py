"""One file per S3 verb; here metadata, blocks and the origin meet."""
