"""Media metadata: what the headers of images, audio and video say, kept in the index."""
