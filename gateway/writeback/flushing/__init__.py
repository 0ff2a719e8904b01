"""How what is pending gets to the origin, and what was begun there and is not needed gets away."""
