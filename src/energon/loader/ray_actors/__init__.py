"""Actors of a Ray cluster that host lanes, on any of its machines."""
