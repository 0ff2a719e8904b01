"""What a prefix may use: slots."""
