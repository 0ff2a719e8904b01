"""The documents of the admin API, and the media types of what is no JSON."""

MANIFEST_TYPE = "application/vnd.forebay.manifest"
"""One s3://bucket/key a line."""

LINES_TYPE = "application/vnd.forebay.snapshot"
"""A snapshot: one JSON document a line."""
