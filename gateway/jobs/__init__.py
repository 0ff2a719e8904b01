"""Work that is done while nobody waits for it, in the background process: durable, resumable, visible, cancellable."""
