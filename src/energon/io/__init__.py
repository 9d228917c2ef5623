"""Bytes at an address: read them, and write them atomically."""
