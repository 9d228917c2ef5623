"""The footers of Parquet files, a table of them, and the card that divides files into splits.

A Parquet file ends with a footer that locates everything in it, the four bytes of the footer's
size, and `PAR1`. A thousand files take a thousand reads, so `.nv-meta/parquet.footers` stores the
footers of a whole folder:

| bytes | content |
|---|---|
| 8 | `ENFOOT01` |
| 8 | H, little-endian |
| H | JSON: `{"files": [[name, size, version, bytes of the footer, [rows of each row group]], …]}` |
| … | the footers, including size and `PAR1`, one after another |

The version is the ETag of a remote file, and the time of the last change of a local one.

The card of a dataset on the Hugging Face Hub, `README.md`, assigns files to splits. It begins with
YAML between two lines `---`, in which `configs` may list configurations:

    configs:
    - config_name: en
      default: true
      data_files:
      - split: train
        path: en/train-*.parquet
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from energon.errors import FormatError, TruncatedError, needs_extra
from energon.formats.meta import yaml
from energon.limits import DOCUMENT_BYTES, PARQUET_FOOTER_BYTES

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData


PARQUET_MAGIC = b"PAR1"
TAIL_BYTES = 8
FOOTERS = "parquet.footers"
_TABLE = b"ENFOOT01"


@dataclass(frozen=True)
class ParquetFooter:
    """The metadata of a file.

    Args:
        name: Its path below the folder.
        size: Size of the file in bytes.
        version: Differs when its content does.
        footer: The end of the file, from the footer on.
        rows: Number of rows of each row group.
    """

    name: str
    size: int
    version: str
    footer: bytes
    rows: tuple[int, ...]


def footer_bytes(tail: bytes, *, size: int, origin: str) -> int:
    """Return how many bytes the end of a file has, from the footer on.

    Args:
        tail: Its last 8 bytes, or more.
        size: Bytes of the file.
        origin: The file, for messages.

    Raises:
        TruncatedError: If it does not end as Parquet files do.
        FormatError: If it is encrypted, or its footer is larger than the file or a limit.
    """
    if size < len(PARQUET_MAGIC) + TAIL_BYTES or tail[-4:] not in (PARQUET_MAGIC, b"PARE"):
        raise TruncatedError(
            f"{origin}: {size} bytes that end with {tail[-4:]!r}, not with {PARQUET_MAGIC!r}; it "
            "is truncated, or not a Parquet file"
        )
    if tail[-4:] != PARQUET_MAGIC:
        raise FormatError(f"{origin}: is encrypted, which is not supported; write it unencrypted")
    found = struct.unpack("<I", tail[-8:-4])[0] + TAIL_BYTES
    if found > size - len(PARQUET_MAGIC):
        raise FormatError(f"{origin}: its footer has {found} bytes, but the whole file only {size}")
    if found > PARQUET_FOOTER_BYTES.value:
        raise FormatError(
            f"{origin}: its footer has {found} bytes, more than {PARQUET_FOOTER_BYTES.value}; "
            f"{PARQUET_FOOTER_BYTES.hint}"
        )
    return int(found)


def parse_footer(footer: bytes, *, origin: str) -> FileMetaData:
    """Parse the footer of a file.

    Raises:
        FormatError: If it is damaged.
        MissingExtraError: If pyarrow is not installed.
    """
    with needs_extra("parquet", "Parquet files need pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        return pq.read_metadata(io.BytesIO(PARQUET_MAGIC + footer))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"{origin}: its footer is damaged: {error}") from error


def group_rows(metadata: FileMetaData, *, origin: str) -> tuple[int, ...]:
    """Return the rows of each row group.

    Raises:
        FormatError: If they are invalid.
    """
    groups = range(metadata.num_row_groups)
    rows = tuple(int(metadata.row_group(number).num_rows) for number in groups)
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise FormatError(
            f"{origin}: its row groups have {sum(rows)} rows, the file {metadata.num_rows}; it is "
            "damaged"
        )
    return rows


def dump_footers(files: Sequence[ParquetFooter]) -> bytes:
    """Return the content of a table of footers."""
    rows = [[f.name, f.size, f.version, len(f.footer), list(f.rows)] for f in files]
    head = json.dumps({"files": rows}).encode()
    return b"".join((_TABLE, struct.pack("<Q", len(head)), head, *(f.footer for f in files)))


def load_footers(data: Any, *, origin: str) -> list[ParquetFooter]:
    """Return the footers of a table.

    Raises:
        FormatError: If it is damaged.
    """
    again = "it is damaged, run `energon prepare` again"
    if len(data) < 16 or bytes(data[:8]) != _TABLE:
        raise FormatError(f"{origin}: begins with {bytes(data[:8])!r}; {again}")
    at = 16 + struct.unpack("<Q", data[8:16])[0]
    if at > min(len(data), DOCUMENT_BYTES.value):
        raise TruncatedError(f"{origin}: its list of files ends at byte {at}; {again}")
    files = []
    try:
        for name, size, version, length, rows in json.loads(bytes(data[16:at]))["files"]:
            footer = bytes(data[at : at + length])
            if len(footer) != length or length < TAIL_BYTES or min(rows, default=0) < 0:
                raise ValueError(f"the footer of {name} is missing")
            files.append(ParquetFooter(str(name), int(size), str(version), footer, tuple(rows)))
            at += length
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{origin}: {error}; {again}") from error
    return files


CARD = "README.md"


class CardConfig(NamedTuple):
    """A configuration: one of the datasets of a repository."""

    name: str
    is_default: bool
    splits: Mapping[str, Sequence[str]]
    """The patterns of the files of each split."""


def parse_card(text: str, *, origin: str) -> list[CardConfig]:
    """Return the configurations that a card lists, if any.

    Raises:
        FormatError: If its YAML is damaged, or lists them in another form.
    """
    head, _, rest = text.partition("---")
    front, mark, _ = rest.partition("\n---")
    if head.strip() or not mark:
        return []
    document = yaml.load(front, origin=origin)
    listed = document.get("configs") if isinstance(document, Mapping) else None
    if listed is None:
        return []
    try:
        found = [_config(each) for each in listed]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{origin}: configs: expected a list of {{config_name, data_files}}: {error!r}"
        ) from error
    return [each for each in found if each.splits]


def _config(about: Mapping[str, Any]) -> CardConfig:
    name = str(about["config_name"])
    folder = str(about.get("data_dir") or "").strip("/")
    files = about.get("data_files")
    if files is None:
        splits = {"": [f"{folder}/**".lstrip("/")]} if folder else {}
    elif isinstance(files, str):
        splits = {"train": [files]}
    elif all(isinstance(each, str) for each in files):
        splits = {"train": list(files)}
    else:
        splits = {}
        for each in files:
            paths = each["path"]
            own = [paths] if isinstance(paths, str) else [str(path) for path in paths]
            splits.setdefault(str(each["split"]), []).extend(own)
    below = f"{folder}/" if folder and files is not None else ""
    return CardConfig(
        name,
        about.get("default") is True or name == "default",
        {split: [f"{below}{path}" for path in paths] for split, paths in splits.items()},
    )
