"""Dataset classes: datasets that a program opens by itself, and the names of sample types."""
