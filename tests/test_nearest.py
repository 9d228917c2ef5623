"""The name that was meant is found, within seconds for names and documents of any size."""

from __future__ import annotations

import random

import pytest

from energon.messages import nearest
from tests.bounded import run_bounded


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("wieght", ["path", "weight", "subset"], "weight"),
        ("shapes2", [f"shapes{n}" for n in range(100)], "shapes2"),
        ("x", ["path"], None),
        ("x", [], None),
        (7, [77, 1], "77"),
    ],
)
def test_finds_what_is_closest(name, known, found):
    assert nearest(name, known) == found


def test_the_same_name_among_many_with_its_letters_is_found():
    letters = list("abcdefghijkl")
    random.Random(3).shuffle(letters)
    known = ["".join(random.Random(seed).sample(letters, 12)) for seed in range(2000)]
    known.append("".join(letters[1::-1] + letters[2:]))
    assert nearest("".join(letters), known) == known[-1]


HOSTILE = {
    "names": """
from energon.messages import nearest
word = "ab" * 500_000
assert nearest(word, ("".join(sorted(word[:n % 900])) for n in range(100_000)), 0.1)
""",
    "keys": """
from energon.errors import ConfigError
from energon.metadataset.document import read_metadataset
keys = {f"pat{n}" + "h" * 1000: n for n in range(3_000)}
for document in ({"splits": {"train": keys}}, {"splits": {"train": {"path": "x", **keys}}}):
    try:
        read_metadataset(document)
    except ConfigError as error:
        said = str(error)
    assert len(said) < 5 << 20, len(said)
assert "has 3000 problems" in said, said[-500:]
""",
    "references": """
from energon.errors import ConfigError
from energon.metadataset.document import read_metadataset
variables = {f"name_{n:05}" + "x" * 200: n for n in range(3_000)}
blend = [{"path": "${name_" + str(n) + "x" * 200 + "}"} for n in range(500)]
try:
    read_metadataset({"vars": variables, "splits": {"train": {"blend": blend}}})
except ConfigError as error:
    assert "is neither in `vars`" in str(error)
""",
    "splits": """
from energon.errors import ConfigError
from energon.formats.meta.info import Split
parts = {"".join(sorted("train" * 20)) + str(n): [] for n in range(20_000)}
try:
    Split(parts).shards("train" * 20)
except ConfigError as error:
    assert "there is no split" in str(error)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_takes_seconds_for_names_made_to_be_compared(kind):
    done = run_bounded(HOSTILE[kind], cpu_seconds=30)
    assert done.returncode == 0, (done.returncode, done.stderr)
