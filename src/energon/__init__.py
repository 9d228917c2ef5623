"""Multimodal training data from WebDatasets."""
