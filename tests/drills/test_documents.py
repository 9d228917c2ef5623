"""Hostile documents and states: they give the right data, or an error of ours, within bounds.

Each case is a document that works, in which pieces were removed, doubled, moved or replaced by
what parsers choke on; or a document that was made to stand for far more than it says.
"""

from __future__ import annotations

import copy
import json

import pytest

from energon.prepare.dataset import prepare_dataset
from tests.datasets import write_shard
from tests.drills.bounded import Bounded
from tests.drills.documents import PLACES, get_savable_loader, open_dataset

DESCRIPTION = """\
sample_type: {__module__: megatron.energon, __class__: TextSample}
field_map: {text: "txt,json[a][0]"}
subflavors: &labels {kind: x, list: [1, 2.5, null]}
shuffle_over_epochs: 1
parallel_shard_iters: 3
max_samples_per_sequence: 4
subset: {range: ["0%", "90%"]}
"""
METADATASET = """\
__module__: megatron.energon
__class__: MetadatasetV2
vars: {root: ., share: 50, labels: &labels {kind: "${root}", deep: [1, {a: b}]}}
splits:
  train:
    temperature: 0.5
    blend:
      - {path: "${root}/ds", weight: auto, max_epochs: 3, subflavors: *labels}
      - weight: auto
        blend_epochized:
          - {path: ds, repetitions: 1.5, subset: {range: ["0%", "${share}%"]}}
          - concat: [{path: ds, shuffle_over_epochs_multiplier: -1}, {path: ./ds}]
"""
SCHEDULED = """\
splits:
  train:
    schedule_unit: batches
    blend:
      - {path: ds, weight: {0: 5, 100: "ramp to 2", 1_000_000: 0.5}}
      - {path: ds, weight: {0: 1, 7: 0}, shuffle_over_epochs_multiplier: 3}
      - join: [{path: ds}, {path: ds, nonmatch: skip}]
        joiner: {__module__: megatron.energon, __class__: TextSample}
"""
SPLIT = """\
split_parts:
  train: ["shards/{0..1}.tar", shards/2.tar]
  val: []
exclude: ["shards/{0,1}.tar/k3", shards/2.tar/k17]
sample_ranges: {train: {shards/1.tar: [1, 5]}}
"""
COUNTS = json.dumps(
    {"energon_version": "7", "shard_counts": {f"shards/{n}.tar": 7 for n in range(3)}}
)
WEB = """\
dataset:
  - {shards: "ds/shards/{0..1}.tar", name: a, weight: 3, scaleprob: 0.5, options: {x: [1]}}
  - {shards: [ds/shards/2.tar], weight: 1, extensions: txt}
"""
SELECTED = """\
prefix: ds/
buckets: [shards]
datasets:
  - {name: a, shards: "{0..2}.tar", resample: 4}
  - {shards: 1.tar, choose: 1}
"""
DOCUMENTS = {
    "metadataset": [METADATASET, SCHEDULED],
    "description": [DESCRIPTION],
    "split": [SPLIT],
    "counts": [COUNTS],
    "web": [WEB, SELECTED],
}
PIECES = (
    *(
        "",
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "-",
        "&x ",
        "*x",
        "*labels",
        "<<: *labels",
        "!!python/x ",
        "#",
    ),
    *("\n", "\t", "\0", "\x1b", "\ud800", "é", "\N{LINE SEPARATOR}", "'", '"', "|", ">", "%", "@"),
    *(
        "0",
        "-1",
        "1.5",
        "1e308",
        "-1e-308",
        "1e999",
        ".nan",
        ".inf",
        "null",
        "true",
        "~",
        "2024-01-01",
    ),
    *(str(1 << bits) for bits in (31, 32, 53, 62, 63, 64, 200)),
    *("9" * 5000, "0x" + "f" * 5000, "1_0" * 1000, "." * 3000, "k" * 100_000),
    *("${root}", "${share}", "${x:-y}", "${", "${env:HOME}", "${a.b.c}", "${root}" * 1000),
    *("{0..9}" * 9, "{0..9999999999}", "{a,b}" * 40, "{" * 2000, "{,}" * 64, "{a..z..0}"),
    *("[" * 400, "[" * 99 + "]" * 99, "{a: " * 150, "- " * 300, "? " * 200),
    *("../../../etc/passwd", "/etc/passwd", "..", ".", "/", "~", "pipe:touch x", "file:///etc"),
    *("auto", "ramp to 1", "ramp to 1e300", "100%", "1e400%", "0." + "3" * 5000 + "%", "end"),
    *("ds", "mix.yaml", "shards/0.tar", "shards/9.tar", "txt", "json[a][b]", "__module__: os"),
    *("__class__: system", "torch.hub", "subprocess", "Popen", "TextSample", "CrudeWebdataset"),
)


def bomb(levels, width, last):
    """Aliases of which each stands for several of the one before."""
    lines = [f"x-0: &a0 {last}"]
    for level in range(1, levels):
        lines.append(f"x-{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join([*lines, "splits: {train: {path: ds}}"])


def laughing(levels, width):
    """Variables of which each is made of several of the next."""
    lines = [f'  v{n}: "{f"${{v{n + 1}}}" * width}"' for n in range(levels)]
    return "\n".join(["vars:", *lines, f"  v{levels}: ds", "splits: {train: {path: '${v0}'}}"])


def listed(count, entry):
    return "splits: {train: {blend: [" + ", ".join([entry] * count) + "]}}"


BOMBS = [
    ("metadataset", bomb(9, 10, "[x, x, x]")),
    ("metadataset", bomb(90, 1, "[" * 50 + "]" * 50)),
    ("metadataset", laughing(19, 9)),
    ("metadataset", "a: " + "[" * 200_000),
    ("metadataset", "a: '" + "${" * 300_000 + "'\nsplits: {train: {path: ds}}"),
    ("metadataset", "{" + ", ".join(f"k{n}: 1" for n in range(100_000)) + "}"),
    ("metadataset", listed(20_000, "{path: nothing}")),
    (
        "metadataset",
        listed(300, "{path: ds, weight: {" + ", ".join(f"{n}: {n % 2}" for n in range(99)) + "}}"),
    ),
    ("metadataset", "splits: {train: {path: mix.yaml}}"),
    (
        "metadataset",
        "splits: {train: {concat: ["
        + "{path: mix.yaml, split_part: a}, " * 9
        + "]}, "
        + ", ".join(
            f"{a}: {{concat: [{f'{{path: mix.yaml, split_part: {b}}}, ' * 9}]}}"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        )
        + ", i: {path: ds}}",
    ),
    ("split", "split_parts: {train: ['{0..9}" + "{0..9}" * 40 + "']}"),
    ("split", "split_parts: {train: ['" + "{a}" * 200_000 + "']}"),
    ("split", "split_parts: {train: [" + "'{0..99999}', " * 50 + "]}"),
    ("split", "split_parts: {train: [shards/0.tar]}\nexclude: ['{0..9}" + "{0..9}" * 40 + "']"),
    ("counts", '{"shard_counts": ' + "[" * 200_000),
    ("counts", '{"shard_counts": {"shards/0.tar": ' + "9" * 4000 + "}}"),
    ("counts", '{"shard_counts": {"shards/0.tar": ' + str(1 << 62) + "}}"),
    ("web", "dataset: [{shards: 'ds/" + "{0..9}" * 30 + "'}]"),
    ("web", "datasets: [{shards: ds/shards/0.tar, resample: 1000000000000}]"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("documents")
    for shard in range(3):
        keys = [f"k{number}" for number in range(shard * 7, shard * 7 + 7)]
        samples = [
            (key, {"txt": f"text {key}".encode(), "json": json.dumps({"a": [key]}).encode()})
            for key in keys
        ]
        write_shard(root / f"ds/shards/{shard}.tar", samples)
    prepare_dataset(
        root / "ds", split_parts=["train:.*"], sample_type="TextSample", field_map={"text": "txt"}
    )
    return root


def mangled(draw, text):
    """A document in which some pieces were removed, doubled, moved or replaced."""
    for _ in range(draw.choice([0, 1, 1, 2, 3, 6])):
        start = draw.randrange(len(text) + 1)
        stop = min(len(text), start + draw.choice([0, 1, 3, 10, 40]))
        piece = draw.choice([draw.choice(PIECES), text[start:stop] * 2, text[stop : stop + 20]])
        text = text[:start] + piece + text[stop:]
    return text[: 1 << 20]


def test_documents_give_the_right_samples_or_an_error_of_ours(folder, budget):
    assert set(DOCUMENTS) == set(PLACES)
    outcomes = set()
    with Bounded("tests.drills.documents:read_document", str(folder)) as bounded:
        for kind, documents in DOCUMENTS.items():
            for document in documents:
                assert bounded([kind, document]).startswith("read: "), document
        for draw in budget.rounds(at_least=50):
            kind = draw.choice(sorted(DOCUMENTS))
            text = mangled(draw, draw.choice(DOCUMENTS[kind]))
            outcomes.add(bounded([kind, text]).partition(":")[0])
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_documents_that_stand_for_far_more_than_they_say_are_refused(folder, number):
    with Bounded("tests.drills.documents:read_document", str(folder)) as bounded:
        assert bounded([*BOMBS[number]]).startswith("refused: "), BOMBS[number][1][:300]


NUMBERS = [0, 1, 7, 1 << 31, 1 << 40, (1 << 53) - 1, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 64, -1]
OTHERS = [None, True, "", "x", "0", 1.5, [], {}, [[]], {"a": {}}, "9" * 5000, [0] * 1000, ["x"]]


def places(value, path=()):
    """The paths of all that is in a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, each in items:
        yield (*path, name)
        yield from places(each, (*path, name))


def edited(draw, state):
    """A state with some of its values deleted, replaced or swapped, or its text mangled."""
    state = copy.deepcopy(state)
    for _ in range(draw.choice([0, 1, 1, 2, 4])):
        # What a state says of the data is compared as a whole, so that has been tried soon.
        every = [path for path in places(state) if path[0] != "fingerprint" or draw.random() < 0.1]
        *path, last = draw.choice(every)
        holder = state
        for name in path:
            holder = holder[name]
        match draw.randrange(5):
            case 0:
                del holder[last]
            case 1 | 2:
                holder[last] = draw.choice(NUMBERS)
            case 3:
                holder[last] = copy.deepcopy(draw.choice(OTHERS))
            case 4:
                nested = holder[last]
                for _ in range(draw.choice([1, 5, 200])):
                    nested = [nested]
                holder[last] = nested
    text = json.dumps(state)
    if draw.random() < 0.1:
        at = draw.randrange(len(text))
        text = (
            text[:at]
            + draw.choice(["", "[" * 100_000, "9" * 5000, "\0", "{", "1e999"])
            + text[at + 3 :]
        )
    return text


def test_states_give_the_right_samples_or_an_error_of_ours(folder, budget):
    saved = {}
    for kind in ("yields", "packs", "groups", "val"):
        loader = get_savable_loader(open_dataset(f"{folder}/ds", kind))
        for _ in zip(range(5), loader, strict=False):
            pass
        saved[kind] = loader.save_state_rank()
    outcomes = set()
    with Bounded("tests.drills.documents:restore_state", str(folder)) as bounded:
        for kind, state in saved.items():
            assert bounded([kind, json.dumps(state)]).startswith("read: "), kind
        for draw in budget.rounds(at_least=50):
            kind = draw.choice(sorted(saved))
            outcomes.add(bounded([kind, edited(draw, saved[kind])]).partition(":")[0])
    assert outcomes == {"read", "refused"}


def spin(_, argument):
    """What the bounds have to catch."""
    if argument == "forever":
        while True:
            pass
    if argument == "all memory":
        return str(len(bytes(1 << 40)))
    return str(argument)


@pytest.mark.parametrize(
    ("case", "message"), [("forever", "ended with"), ("all memory", "MemoryError")]
)
def test_the_bounds_hold(case, message):
    with Bounded("tests.drills.test_documents:spin", cpu_seconds=2) as bounded:
        assert bounded("fine") == "fine"
        with pytest.raises(AssertionError, match=message):
            bounded(case)
        assert bounded("fine again") == "fine again"
