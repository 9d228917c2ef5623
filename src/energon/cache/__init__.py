"""Auxiliary data now or later.

A cache pool returns files of file stores: at once, or as lazies, which are handles to files that
are fetched to local disk in the background meanwhile. Nothing depends on a cache but the time
that it takes: what is not there is read from its store.
"""
