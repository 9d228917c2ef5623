"""Kinds of datasets whose samples are rows: Parquet, Arrow and JSON Lines."""
