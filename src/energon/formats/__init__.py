"""The meaning of bytes on disk, one file per format. Opens nothing remote."""
