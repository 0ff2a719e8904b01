"""Files that stay whole, locks on them, and how threads use them."""
