"""Compare a dataset with its index, and repair what is missing or damaged."""
