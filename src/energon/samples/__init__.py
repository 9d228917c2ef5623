"""Samples and batches: typed dataclasses, crude dicts, and how lists of them are collated."""
