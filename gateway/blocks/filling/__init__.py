"""How blocks come to the disk: one fill for all who wait for it, from the origin or from a file that is here."""
