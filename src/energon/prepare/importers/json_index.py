"""The `index.json` beside the chunks of other libraries."""

from __future__ import annotations

from typing import Any

from energon.formats.json_text import parse_json
from energon.io.epath import AnyPath
from energon.io.files import read_document
from energon.prepare.files import reporting
from energon.utf8 import decode_utf8

NAME = "index.json"


def read_json_index(folder: AnyPath) -> Any:
    """Return what the index of a folder says.

    Raises:
        FormatError: If it is not JSON.
        StorageError: If it cannot be read.
    """
    path = folder / NAME
    with reporting(path):
        text = decode_utf8(read_document(path), origin=str(path))
    return parse_json(text, origin=str(path), hint="copy the folder again, or write it again")
