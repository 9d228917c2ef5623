"""Everything that writes a dataset: its index, its splits, its description."""
