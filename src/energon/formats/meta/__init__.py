"""The files in `.nv-meta`: YAML and JSON that describe a dataset and its splits."""
