"""The listing index: what the origin's buckets hold, in order, as far as it has been listed, for all workers."""
