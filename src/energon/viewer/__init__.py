"""The dataset browser of `energon view`: a local server that renders pages on request.

Everything shown may come from strangers: text is escaped, addresses contain numbers in place of
names, and parts never run. Nothing is read until it is shown, so ten million samples open as
quickly as ten.
"""
