"""Auxiliary data now or later.

A cache pool returns files of file stores: at once, or as lazies, handles to files that are fetched
to local disk in the background. A cache affects speed only: whatever it lacks is read from its
store.
"""
