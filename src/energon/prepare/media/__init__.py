"""Media metadata: facts from the headers of images, audio and video, kept in the index."""
