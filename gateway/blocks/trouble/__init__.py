"""A cache directory that refuses: left alone for a while, and tried again."""
