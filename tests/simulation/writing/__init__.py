"""Histories of several nodes that write, over one bucket and one registry, with all that goes wrong between them."""
