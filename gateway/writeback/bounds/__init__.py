"""Bounds on the data that only this node has, and on its share of the file system's room."""
