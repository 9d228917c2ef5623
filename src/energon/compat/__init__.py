"""What exists only because programs written for other libraries expect it.

The core never imports anything from here.
"""
