"""Write samples to tar files."""
