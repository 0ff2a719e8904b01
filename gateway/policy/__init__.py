"""The rules for a prefix and its callers: slots, rights, limits, and shares of the link."""
