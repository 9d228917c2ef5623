"""Interfaces that exist only because programs written for other libraries expect them.

The core never imports anything from here.
"""
