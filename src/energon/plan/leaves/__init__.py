"""The order of the samples of one leaf: what determines it, draws, and the way back to a draw.

Also which samples a leaf has: subsets, excluded ones, and windows over the tokens of documents.
"""
