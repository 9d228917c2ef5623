"""Files by name: auxiliary data and the stores that hold it."""
