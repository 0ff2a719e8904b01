"""What operators see of what is pending, and what they decide about it."""
