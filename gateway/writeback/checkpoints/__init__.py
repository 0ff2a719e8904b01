"""Checkpoints as training jobs save them: which objects belong to one, and which of them name the others."""
