"""Reading the rows that a plan names: in blocks, which lanes of a worker share."""
