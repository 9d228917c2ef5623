"""Folders of images, audio and video as datasets."""
