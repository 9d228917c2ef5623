"""Bytes become images, arrays and text, by the extension of their name."""
