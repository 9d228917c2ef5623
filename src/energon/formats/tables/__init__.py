"""The tables of an index: part tables, `index.sqlite`, join indexes."""
