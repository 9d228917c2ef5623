"""Chunks of records, as MosaicML Streaming (MDS) and LitData write them."""
