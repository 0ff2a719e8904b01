"""Checkpoints: which objects make one, what state it is in, which files its manifest names."""
