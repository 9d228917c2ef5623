"""The user's hooks, and the pipeline built from them.

`encoder.py` has the hooks; `recipe.py` is the one place where the order of the stages is
written down; `getters.py` has the functions that users call for a dataset.
"""
