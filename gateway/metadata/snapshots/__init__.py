"""Snapshots: what a prefix of the origin held when it was listed, frozen on this node's disk under a name."""
