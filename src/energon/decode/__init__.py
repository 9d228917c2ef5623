"""Decode bytes to images, arrays, audio, video and text, by file extension."""
