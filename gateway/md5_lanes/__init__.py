"""MD5 of several streams at once."""
