"""Samples by ordinal.

A source opens one leaf, a split of a dataset, and reads any of its samples: the tar files are
never scanned in order. `reader.py` joins the sources of all leaves for a pipeline.
"""
