"""Origins that are no S3: a narrow store of objects behind the face of one."""
