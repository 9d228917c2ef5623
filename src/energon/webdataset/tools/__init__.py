"""What the command `energon tar` does: make, join, cut, sort, change and check tar files."""
