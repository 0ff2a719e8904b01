"""Background jobs: durable, resumable, visible, cancellable."""
