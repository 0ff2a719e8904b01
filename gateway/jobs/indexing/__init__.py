"""The index of a slot that keeps itself complete and fresh: crawls of the origin, and what they find out."""
