"""Workers that all ranks of a host share."""
