"""Flushing: takes pending writes to the origin, and aborts what was begun there and is not needed."""
