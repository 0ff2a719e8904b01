"""Writes in slots with `write = "back"`: acknowledged when this node's disk has them."""
