"""Bytes at an address: read them, write them so that nothing is ever half there."""
