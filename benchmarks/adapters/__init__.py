"""One file per library: `batches(path, num_workers, batch_size, shuffle, program)` yields batches.

What a program does is written once, in `programs.py` for all and in `task_encoders.py` and
`streams.py` for the two interfaces that several libraries have. The adapters import them for their
library, and raise KeyError for what it cannot do.
"""
