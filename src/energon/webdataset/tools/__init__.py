"""The tools behind `energon tar`: create, join, split, sort, change and check tar files."""
