"""The parts that every layer shares: errors, the nouns, time."""
