"""Requests in slots that are frozen by a snapshot: what there is, and in which version, says the snapshot alone."""
