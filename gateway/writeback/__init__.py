"""The write-back buffer: writes that are acknowledged on this node's disk, and reach the origin later."""

DIRECTORY = "writeback"
"""The buffer's name in the cache directory."""
