"""Hostile shards, part tables and indexes: the right data or an error of ours, within bounds."""

from __future__ import annotations

import base64
import io
import tarfile

import pytest

from energon.prepare.dataset import prepare_dataset
from tests.drills.bounded import Bounded

CASES_AT_LEAST = 12
BLOCK = 512
NAME, SIZE, CHECKSUM, TYPE = slice(0, 100), slice(124, 136), slice(148, 156), slice(156, 157)
SIZES = (
    *(b"-0000001000\0", b"77777777777\0", b"00000000000\0", b"0000000zzzz\0", b" " * 12),
    *(b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\0" * 12, b"+0000000012\0"),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Shards with plain headers, PAX headers and GNU long names."""
    root = tmp_path_factory.mktemp("hostile") / "ds"
    root.mkdir()
    formats = (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
    for shard, kind in enumerate(formats):
        with tarfile.open(root / f"{shard}.tar", "w", format=kind) as tar:
            for number in range(12):
                key = f"k{shard}{number:03}" if number % 4 else f"k{shard}{number:03}" + "n" * 120
                for part, content in (("txt", b"text"), ("json", b'{"a": [1, 2]}')):
                    name = f"{key[:90]}.{part}" if kind == tarfile.USTAR_FORMAT else f"{key}.{part}"
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    if kind == tarfile.PAX_FORMAT:
                        member.pax_headers = {"comment": "ä" * number, "mtime": "1.5"}
                    tar.addfile(member, io.BytesIO(content))
    prepare_dataset(root, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    return root


def hostile(data, rng, *, is_tar):
    """Return `data` with a few bytes changed, cut, repeated, or a tar header that lies."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(
            ("flip", "cut", "repeat", "zero", "header") if is_tar else ("flip", "cut", "zero")
        )
        at = rng.randrange(len(data)) if data else 0
        if kind == "flip" and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[at:]
        elif kind == "zero":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        elif kind == "repeat":
            at -= at % BLOCK
            data[at:at] = data[at : at + BLOCK * rng.randint(1, 6)]
        elif kind == "header" and len(data) >= BLOCK:
            lie(data, rng, (at // BLOCK) * BLOCK)
    return bytes(data)


def lie(data, rng, at):
    """Change a field of the block at `at` and give it the checksum of a header."""
    block = bytearray(data[at : at + BLOCK].ljust(BLOCK, b"\0"))
    field = rng.choice(("size", "type", "name"))
    if field == "size":
        block[SIZE] = rng.choice(SIZES)
    elif field == "type":
        block[TYPE] = rng.choice((b"x", b"g", b"L", b"K", b"S", b"1", b"5", b"\0", b"Z"))
    else:
        block[NAME] = rng.randbytes(100)
    block[CHECKSUM] = b" " * 8
    block[CHECKSUM] = b"%06o\0 " % sum(block)
    data[at : at + BLOCK] = block


def test_hostile_shards_and_indexes_give_the_right_data_or_an_error_of_ours(dataset, budget):
    files = [
        str(file.relative_to(dataset))
        for file in sorted(dataset.rglob("*"))
        if file.suffix in (".tar", ".parts", ".idx", ".sqlite") or file.name == ".info.json"
    ]
    assert len(files) >= 8
    with Bounded("tests.drills.shards:read", str(dataset)) as bounded:
        for rng in budget.rounds(CASES_AT_LEAST):
            name = rng.choice(files)
            data = hostile((dataset / name).read_bytes(), rng, is_tar=name.endswith(".tar"))
            outcome = bounded({"file": name, "data": base64.b64encode(data).decode()})
            assert "trained: " in outcome, (budget.seed, name, outcome)
            budget.done["files"] += 1
