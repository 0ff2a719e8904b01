"""The S3 wire format, pure: bytes and values in, values and bytes out; no I/O."""
