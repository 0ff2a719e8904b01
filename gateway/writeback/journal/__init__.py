"""What was acknowledged, and what has become of it: one SQLite database, changed a transaction at a time."""
