"""Immutable blocks of objects on this node's disk."""
