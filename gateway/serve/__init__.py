"""`forebay serve`: one supervisor, its S3 workers and its background process."""
