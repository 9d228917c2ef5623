"""Stages as classes that users nest to build their own pipelines.

Every wrapper is a dataset: it can be wrapped again, passed to a loader, saved and resumed.
"""
