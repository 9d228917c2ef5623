"""A YAML document becomes a flat list of leaves.

`grammar.py` is what may be written (`grammar_v1.py` in version 1), `variables.py` replaces
references, `document.py` reads a file, and `problems.py`
words what is wrong, with file, line and column. `resolve.py` follows the references of one split to
the leaves and continues after problems (`collected.py`), `inherit.py` says what each level hands
down, and `tree.py` keeps how the leaves are mixed.
`dataset_config.py` reads `.nv-meta/dataset.yaml` of one dataset in the same manner. Nothing of
a dataset is opened here; its folder is looked at once.
"""
