"""Kinds of datasets whose samples are numbered rows: Parquet, Arrow, JSON Lines, token files."""
