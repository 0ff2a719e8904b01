"""The journal of acknowledged writes and their fates: one SQLite database, changed a transaction at a time."""
