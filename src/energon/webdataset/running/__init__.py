"""Iterate over a pipeline: epochs, ranks and workers, and their positions."""
