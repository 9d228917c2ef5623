"""Import this to check types while a program runs, where `typeguard` is installed."""

from __future__ import annotations

from contextlib import suppress

from energon.webdataset.names import HOMES, PACKAGE

modules = [name for name, home in HOMES.items() if home == PACKAGE]
"""What is checked when it is imported after this."""

with suppress(ImportError):
    from typeguard import install_import_hook

    for module in modules:
        install_import_hook(f"{PACKAGE}.{module}")
