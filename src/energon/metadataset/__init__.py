"""Resolve a YAML document to a flat list of leaves.

`grammar.py` defines what may be written, `variables.py` replaces references, `document.py` reads a
file, and `problems.py` words its errors with file, line and column. `resolve.py` follows the
references of one split to the leaves (`leaf.py`), and `tree.py` records how the leaves are mixed.
`kind.py` recognizes kinds of datasets, and `dataset_config.py` reads `.nv-meta/dataset.yaml` of one
dataset. No dataset is opened here; its folder is inspected once.
"""
