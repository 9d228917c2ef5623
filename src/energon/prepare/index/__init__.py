"""The index of a dataset: found by scanning shards, written beside them and in `.nv-meta`."""
