"""Worker processes: how they start, what they do, and how they are replaced."""
