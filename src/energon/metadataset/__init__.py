"""A YAML document becomes a flat list of leaves.

`grammar.py` is what may be written, `document.py` reads a file by it and `problems.py` words
what is wrong with it, with file and line. `resolve.py` follows the references of one split to
the leaves and multiplies what the levels say: weights, repetitions, subsets, subflavors.
`dataset_config.py` reads `.nv-meta/dataset.yaml` of one dataset in the same manner. Nothing of
a dataset is opened here; its folder is looked at once.
"""
