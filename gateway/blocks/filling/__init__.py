"""Bringing blocks to disk: one fill for all waiting readers, from the origin or from a local file."""
