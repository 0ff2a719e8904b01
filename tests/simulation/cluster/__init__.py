"""Histories of several nodes that read from each other, over one bucket, with all that goes wrong between them."""
