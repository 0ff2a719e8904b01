"""The bucket behind the gateway."""
