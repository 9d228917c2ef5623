"""Datasets as trees of folders and files."""
