"""Import this to check types while a program runs, where `typeguard` is installed."""

from __future__ import annotations

from contextlib import suppress

modules = [
    *("autodecode", "cache", "compat", "extradatasets", "filters", "gopen", "handlers", "mix"),
    *("pipeline", "shardlists", "tariterators", "tenbin", "utils", "writer"),
]
"""What is checked when it is imported after this."""

with suppress(ImportError):
    from typeguard import install_import_hook

    for module in modules:
        install_import_hook(f"energon.webdataset.{module}")
