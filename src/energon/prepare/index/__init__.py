"""The index of a dataset: made by scanning shards, written next to them and in `.nv-meta`."""
