"""One file for each kind of storage."""
