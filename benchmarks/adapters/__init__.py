"""One file per library: `batches(path, kind, num_workers)` yields lists of dicts of raw bytes."""
