"""Forebay: an S3-compatible caching gateway for AI training."""

__version__ = "0.1.0"
