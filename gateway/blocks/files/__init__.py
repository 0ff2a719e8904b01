"""Files of blocks on this node's disk: written, opened, verified, watched; and where such work runs."""
