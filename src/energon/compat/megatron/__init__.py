"""`megatron.energon`: the names, classes and arguments that programs for Megatron-Energon use.

`names.py` is the table of all names and their homes; `finder.py` makes the modules of
`megatron.energon` from it, and `stubs.py` the `.pyi` files by which editors find them.
"""
