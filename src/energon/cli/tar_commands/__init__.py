"""The commands of `energon tar`, one per file."""
