"""What the repository uses on itself."""
