"""`megatron.energon`: the names, classes and arguments that programs for Megatron-Energon use.

`names.py` is the table of all names and their homes; `finder.py` makes the modules of
`megatron.energon` from it, and the `.pyi` files by which editors find them.
"""

VERSION = "7.4.1"
"""The release of Megatron-Energon whose programs run here, reported by `megatron.energon`."""
