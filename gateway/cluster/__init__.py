"""Several nodes that read from each other: who is there, who looks after which block, and how it is asked."""
