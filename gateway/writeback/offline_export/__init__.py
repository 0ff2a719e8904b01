"""Getting what was acknowledged out of a buffer's directory, without a gateway and without changing anything there."""
