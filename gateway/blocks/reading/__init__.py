"""How a range is read: from blocks on disk, from fills that are under way, or past both."""
