"""What bodies of the admin port are called, for it and for the commands that send them."""

MANIFEST_TYPE = "application/vnd.forebay.manifest"
"""One s3://bucket/key a line."""

LINES_TYPE = "application/vnd.forebay.snapshot"
"""A snapshot: one JSON document a line."""
