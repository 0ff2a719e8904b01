"""The admin port: health, metrics."""
