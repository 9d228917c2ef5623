"""The steps of a stream: choose, change, decode, shuffle and batch samples."""
