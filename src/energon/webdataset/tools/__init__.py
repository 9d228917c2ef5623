"""The tools behind `energon tar`: create, join, split, change and index tar files."""
