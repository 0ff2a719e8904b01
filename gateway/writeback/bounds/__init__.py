"""How much of what only this node has there may be, and what the file system has room for."""
