"""Packing: which samples go into one sequence, and what attention needs to keep them apart.

Arithmetic on lengths: no files, no torch.
"""
