"""Dataset classes: datasets that a program opens on its own, and the names of sample types."""
