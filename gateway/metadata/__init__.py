"""The catalog, the listing index and snapshots: knowledge of objects without their bytes."""
