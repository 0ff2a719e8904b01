"""What every layer shares: errors, the nouns, time."""
