"""Operators' view of pending writes, and their decisions about them."""
