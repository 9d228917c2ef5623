"""Datasets of MosaicML Streaming (MDS) and LitData, as kinds of datasets of energon.

The entry points of this distribution name `MDS` and `LITDATA`, so energon recognizes such datasets
as soon as it is installed; no program imports it.
"""

from __future__ import annotations

from energon.metadataset.kind import KindEntry

_INDEXES = ("index.json", "*/index.json")

MDS = KindEntry(
    "mds",
    "energon_mds.source:MDS",
    holds=_INDEXES,
    says="shards",
    rows="energon_mds.source:mds_rows",
)
LITDATA = KindEntry(
    "litdata",
    "energon_mds.source:LITDATA",
    holds=_INDEXES,
    says="chunks",
    rows="energon_mds.source:litdata_rows",
)
