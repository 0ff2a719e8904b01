"""Opening of a cache directory, and its regular maintenance."""
