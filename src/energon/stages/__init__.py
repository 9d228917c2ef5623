"""The steps of a pipeline, one per file.

A stage is a frozen description (`Dataset`) and an iterator that holds a position in one lane
(`DatasetIterator`). Stages are composed once, in `task_encoder/recipe.py`, and opened in
whichever worker hosts the lane; a position is plain JSON and cheap to save.
"""
