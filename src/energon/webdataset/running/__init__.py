"""Iterate over a pipeline: epochs, workers, ranks, and where each of them is."""
