from __future__ import annotations

import json
import os
import pickle
import struct
from itertools import chain, islice, pairwise

import numpy as np
import pytest

from energon import (
    ConfigError,
    DatasetNotFoundError,
    DefaultTaskEncoder,
    EmptyDatasetError,
    TokensSample,
    get_savable_loader,
    get_train_dataset,
)
from energon.errors import FormatError, ShardChangedError, TruncatedError
from energon.formats.tokens import token_index_bytes
from energon.io.address import join_address
from energon.io.files import write_bytes
from energon.metadataset.kind import dataset_kind
from energon.sources.source import SampleSelection
from energon.sources.tables.token_files import TokenOptions, TokenRows, TokenSource
from tests.commands import run, run_python
from tests.datasets import make_crude
from tests.effort import mixed
from tests.kind_checks import plain
from tests.sources.reads import read_samples
from tests.task_encoder.runs import config
from tests.token_files import CODES, numbered, write_tokens

LENGTHS = [3, 1, 0, 7, 5, 12, 2, 9, 4, 1] * 20
TOTAL = sum(LENGTHS)


@pytest.fixture
def path(tmp_path):
    return write_tokens(tmp_path / "corpus", numbered(LENGTHS))


def sequence(path, length, **options):
    return {
        "splits": {
            "train": {"path": str(path), "read": {"unit": "sequence", "length": length, **options}}
        }
    }


def tokens_of(source, ordinals=None):
    found = read_samples(source, np.arange(len(source)) if ordinals is None else np.array(ordinals))
    return [sample["tokens"].tolist() for sample in found]


@pytest.mark.parametrize("name", ["corpus.idx", "corpus.bin", "corpus", ""])
def test_the_address_is_either_file_what_they_have_in_common_or_the_folder(tmp_path, path, name):
    assert dataset_kind(tmp_path / name) == "tokens"
    assert tokens_of(TokenSource(tmp_path / name)) == numbered(LENGTHS)


def test_documents_of_any_ordinals_come_in_their_order(path):
    source = pickle.loads(pickle.dumps(TokenSource(path)))
    ordinals = np.random.default_rng(0).integers(0, len(LENGTHS), 500)
    samples = read_samples(source, ordinals)
    documents = numbered(LENGTHS)
    assert [s["tokens"].tolist() for s in samples] == [documents[n] for n in ordinals]
    assert [s["__key__"] for s in samples] == [str(n) for n in ordinals]
    assert samples[0]["tokens"].dtype == np.int64
    assert read_samples(source, np.array([], np.int64)) == []
    with pytest.raises(IndexError, match="0 to 199, not 200"):
        read_samples(source, np.array([200]))
    place = source.locate(3)
    assert (place.shard, place.key, place.offset) == ("corpus.bin", "3", 2 * 4)
    assert source.find("3") == [3]
    assert source.find("200") == []


@pytest.mark.parametrize("dtype", CODES)
def test_tokens_of_every_type_are_read(tmp_path, dtype):
    documents = [[1, 2, 3], [], [100]]
    path = write_tokens(tmp_path / "x", documents, dtype=dtype)
    assert tokens_of(TokenSource(path)) == documents
    kind = np.float64 if dtype.startswith("float") else np.int64
    assert TokenSource(path).corpus.dtype == kind


def test_a_document_of_several_sequences_says_where_they_begin(tmp_path):
    documents = [[[1, 2], [3]], [[4]], [[5], [6, 7], [8]]]
    path = write_tokens(tmp_path / "x", documents, dtype="int32", modes=[0, 1, 0, 0, 1, 0])
    samples = read_samples(TokenSource(path), np.array([2, 0]))
    assert samples[0]["tokens"].tolist() == [5, 6, 7, 8]
    assert samples[0]["cu_seqlens"].tolist() == [0, 1, 3, 4]
    assert samples[0]["modes"].tolist() == [0, 1, 1, 0]
    assert samples[1]["cu_seqlens"].tolist() == [0, 2, 3]
    assert samples[1]["modes"].tolist() == [0, 0, 1]
    windows = read_samples(
        TokenSource(path, options=TokenOptions("sequence", 8, seed=None)), np.array([0])
    )
    assert windows[0]["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert windows[0]["cu_seqlens"].tolist() == [0, 3, 4, 8]
    assert windows[0]["modes"].tolist() == [0, 0, 1, 0, 0, 1, 1, 0]


def test_lines_are_the_sequences_of_all_documents(tmp_path):
    for number, documents in enumerate(([[[1, 2], [3]], [[4]]], [], [[[5], [6, 7], []]])):
        modes = [0, 1, 0] if documents else []
        write_tokens(tmp_path / f"x/{number}", documents, dtype="int32", modes=modes)
    source = TokenSource(tmp_path / "x", options=TokenOptions("line"))
    assert tokens_of(source) == [[1, 2], [3], [4], [5], [6, 7], []]
    samples = read_samples(source, np.array([4, 1]))
    assert [sample["modes"].tolist() for sample in samples] == [[1, 1], [1]]
    assert [sample["cu_seqlens"].tolist() for sample in samples] == [[0, 2], [0, 1]]
    assert [sample["__shard__"] for sample in samples] == ["2.bin", "0.bin"]
    assert (source.find("4"), source.locate(4).offset) == ([4], 4)
    options = TokenOptions("line", split="2,1,0")  # documents are not divided
    assert tokens_of(TokenSource(tmp_path / "x", options=options)) == [[1, 2], [3], [4]]
    val = TokenSource(tmp_path / "x", SampleSelection("val"), options=options)
    assert tokens_of(val) == [[5], [6, 7], []]
    assert read_samples(val, np.array([0]))[0]["__key__"] == "3"


def test_windows_hold_each_token_once_and_say_where_documents_begin(path):
    source = TokenSource(path, options=TokenOptions("sequence", 16))
    assert len(source) == TOTAL // 16
    documents = numbered(LENGTHS)
    starts = {document[0]: document for document in documents if document}
    seen = []
    for sample in read_samples(source, np.arange(len(source))):
        tokens, edges = sample["tokens"].tolist(), sample["cu_seqlens"].tolist()
        assert (edges[0], edges[-1], len(tokens)) == (0, 16, 16)
        assert edges == sorted(set(edges))
        for low, high in pairwise(edges):
            piece = tokens[low:high]
            assert piece == list(range(piece[0], piece[0] + len(piece)))
            if low:
                assert piece == starts[piece[0]][: len(piece)]
        seen += tokens
    assert len(seen) == len(set(seen)) == TOTAL // 16 * 16
    assert seen != sorted(seen)
    assert tokens_of(source, [7, 2, 7]) == [tokens_of(source)[n] for n in (7, 2, 7)]


def test_windows_overlap_as_they_are_told(path):
    options = TokenOptions("sequence", 17, overlap=1, seed=None)
    windows = tokens_of(TokenSource(path, options=options))
    assert windows == [list(range(16 * n, 16 * n + 17)) for n in range((TOTAL - 1) // 16)]
    for length, overlap in ((1, 0), (5, 4), (TOTAL, 0), (TOTAL, TOTAL - 1), (300, 299)):
        options = TokenOptions("sequence", length, overlap=overlap, seed=None)
        windows = tokens_of(TokenSource(path, options=options))
        step = length - overlap
        assert windows == [
            list(range(at, at + length)) for at in range(0, TOTAL - length + 1, step)
        ]


def test_windows_cross_blocks_of_documents_and_files(tmp_path):
    lengths = np.random.default_rng(1).integers(0, 6, 5000).tolist()
    documents = numbered(lengths)
    for number, (low, high) in enumerate(((0, 1500), (1500, 1501), (1501, 5000))):
        write_tokens(tmp_path / f"part_{number}", documents[low:high], dtype="int32")
    source = TokenSource(tmp_path, options=TokenOptions("sequence", 1000))
    seen = [token for window in tokens_of(source) for token in window]
    assert len(seen) == len(set(seen)) == sum(lengths) // 1000 * 1000
    in_order = TokenSource(tmp_path, options=TokenOptions("sequence", 1000, seed=None))
    assert [*chain(*tokens_of(in_order))] == list(range(sum(lengths) // 1000 * 1000))
    assert tokens_of(TokenSource(tmp_path), [4999, 1500, 0]) == [
        documents[n] for n in (4999, 1500, 0)
    ]


@pytest.mark.parametrize("dtypes", [("uint16", "int32"), ("uint8", "float32", "uint8")])
def test_windows_cross_files_of_different_types(tmp_path, dtypes):
    documents = [[n % 200, (n + 1) % 200] for n in range(300)]
    for number, dtype in enumerate(dtypes):
        write_tokens(tmp_path / f"part_{number}", documents[number :: len(dtypes)], dtype=dtype)
    source = TokenSource(tmp_path, options=TokenOptions("sequence", 250, seed=None))
    expected = [*chain(*(chain(*documents[n :: len(dtypes)]) for n in range(len(dtypes))))]
    assert [*chain(*tokens_of(source))] == expected[:500]
    kind = np.float64 if "float32" in dtypes else np.int64
    assert all(sample["tokens"].dtype == kind for sample in read_samples(source, np.arange(2)))


def test_another_seed_lays_the_documents_in_another_order(path):
    first, again, other = (
        tokens_of(TokenSource(path, options=TokenOptions("sequence", 16, seed=seed)))
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_the_names_of_files_tell_splits(tmp_path, caplog):
    for name in ("train_a", "train_b", "corpus-valid", "test/0"):
        write_tokens(tmp_path / name, [[1, 2], [3]])
    with caplog.at_level("INFO", "energon"):
        sizes = {
            n: len(TokenSource(tmp_path, SampleSelection(n))) for n in ("train", "valid", "test")
        }
    assert sizes == {"train": 4, "valid": 2, "test": 2}
    (message,) = [each for each in caplog.messages if "splits by the names" in each]
    assert "train (2 files like train_a.bin), val (1 file like corpus-valid.bin)" in message
    about = json.loads(run("info", tmp_path, "--json").output)
    assert {name: each["samples"] for name, each in about["splits"].items()} == {
        "train": 4,
        "val": 2,
        "test": 2,
    }
    with pytest.raises(ConfigError, match="no split 'dpo', only train, val, test, according to"):
        TokenSource(tmp_path, SampleSelection("dpo"))
    assert len(TokenSource(tmp_path, options=TokenOptions(split="6,1,1"))) == 6  # of all files
    assert len(TokenSource(tmp_path / "corpus-valid")) == 2  # a single file is train


def test_a_ratio_deals_documents_to_splits(path):
    options = TokenOptions(split="98,1,1")
    parts = [
        tokens_of(TokenSource(path, SampleSelection(name), options=options))
        for name in ("train", "val", "test")
    ]
    assert [len(part) for part in parts] == [196, 2, 2]
    assert [*chain(*parts)] == numbered(LENGTHS)
    assert len(TokenSource(path, SampleSelection("valid"), options=options)) == 2
    with pytest.raises(ConfigError, match=r"no split 'test', only train, val; the ratio '99,1,0'"):
        TokenSource(path, SampleSelection("test"), options=TokenOptions(split="99,1,0"))
    with pytest.raises(ConfigError, match=r'no split \'val\', only train; say which .*"99,1,0"'):
        TokenSource(path, SampleSelection("val"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"unit": "word"}, "unit is 'word'; expected document, line or sequence"),
        ({"unit": "sequence"}, "needs a length"),
        ({"unit": "sequence", "length": 0}, "needs a length"),
        ({"unit": "sequence", "length": "many"}, "length is 'many'; expected a whole number"),
        ({"unit": "sequence", "length": 4, "overlap": 4}, "overlap is 4; expected 0 to 3"),
        ({"length": 4}, "length and overlap are for `unit: sequence`"),
        ({"split": "99;1"}, "split is '99;1'; expected up to three numbers"),
        ({"split": "0,0,0"}, "split is '0,0,0'; expected up to three numbers"),
        ({"split": "1,-1"}, "split is '1,-1'; expected up to three numbers"),
        ({"split": "nan,1"}, "split is 'nan,1'; expected up to three numbers"),
        ({"lenght": 4}, "'lenght' is not an option of a set of token files; did you mean 'length'"),
    ],
)
def test_options_that_make_no_sense_are_refused(path, options, problem):
    document = {"splits": {"train": {"path": str(path), "read": options}}}
    with pytest.raises(ConfigError, match=problem):
        get_train_dataset(document, worker_config=config(), batch_size=1)


def test_other_kinds_have_no_such_options(tmp_path):
    make_crude(tmp_path / "tars", [3])
    document = {"splits": {"train": {"path": str(tmp_path / "tars"), "read": {"length": 4}}}}
    with pytest.raises(ConfigError, match="'length' is not an option of .*; has none"):
        get_train_dataset(document, worker_config=config(), batch_size=1)
    (tmp_path / "inner.yaml").write_text("splits: {train: {path: tars}}")
    document["splits"]["train"]["path"] = str(tmp_path / "inner.yaml")
    with pytest.raises(ConfigError, match="how to read belongs to a dataset"):
        get_train_dataset(document, worker_config=config(), batch_size=1)


def test_batches_are_stacked_and_padded(path):
    batch = next(iter(get_train_dataset(sequence(path, 16), worker_config=config(), batch_size=4)))
    assert isinstance(batch, TokensSample)
    assert batch.tokens.shape == (4, 16)
    assert [each[-1] for each in batch.cu_seqlens] == [16] * 4
    documents = next(iter(get_train_dataset(path, worker_config=config(), batch_size=64)))
    assert documents.tokens.shape == (64, 12)
    assert documents.modes is None


class OneByOne(DefaultTaskEncoder):
    """Sees each sample, so that batches are made of samples, not of columns."""

    def encode_sample(self, sample):
        return sample


@pytest.mark.parametrize(
    ("lengths", "modes"),
    [
        *mixed([(16,), (None,)], [(True,), (False,)]),
        *mixed([(16, 16), (16, 9), (None, None)], [(True, True), (True, False)]),
    ],
)
def test_batches_are_the_same_with_and_without_single_samples(tmp_path, lengths, modes):
    entries = []
    for name, dtype, length, has_modes in zip(
        "ab", ("uint16", "int32"), lengths, modes, strict=False
    ):
        path = write_tokens(
            tmp_path / name,
            numbered(LENGTHS),
            dtype=dtype,
            modes=[n % 3 for n in range(N)] if has_modes else None,
        )
        read = {"unit": "sequence", "length": length} if length else {}
        entries.append({"path": str(path), "read": read})
    runs = []
    for encoder in (DefaultTaskEncoder(), OneByOne()):
        dataset = get_train_dataset(
            {"splits": {"train": {"blend": entries}}},
            worker_config=config(lanes=2),
            batch_size=5,
            task_encoder=encoder,
        )
        loader = get_savable_loader(dataset)
        batches = list(islice(loader, 40))
        runs.append((batches, loader.state_dict()))
    leaves = {key[0] for batch in runs[0][0] for key in batch.__restore_key__[1]}
    assert len(leaves) == len(lengths)
    assert plain(runs[0][0]) == plain(runs[1][0])
    assert runs[0][1:] == runs[1][1:]


class Labels(DefaultTaskEncoder):
    """Batches of inputs and labels, made of what was collated."""

    def encode_batch(self, batch):
        return {"tokens": batch.tokens[:, :-1], "labels": batch.tokens[:, 1:]}


@pytest.mark.parametrize(
    ("encoder", "weight"),
    mixed([DefaultTaskEncoder, Labels], [None, 1, {0: 0.1, 4: 0.1, 12: "ramp to 1"}]),
)
def test_pretraining_programs_make_no_single_samples(tmp_path, monkeypatch, encoder, weight):
    for name in ("web", "code"):
        write_tokens(tmp_path / name, numbered(LENGTHS))
    read = {"unit": "sequence", "length": 9, "overlap": 1}
    web, code = ({"path": str(tmp_path / f"{n}.idx"), "read": read} for n in ("web", "code"))
    blend = {"blend": [{**web, "weight": 1}, {**code, "weight": weight}]}
    made = []
    monkeypatch.setattr(TokenRows, "sample", lambda *arguments: made.append(arguments))
    dataset = get_train_dataset(
        {"splits": {"train": blend if weight else web}},
        worker_config=config(lanes=2),
        batch_size=4,
        task_encoder=encoder(),
    )
    assert sum(1 for _ in islice(dataset, 20)) == 20
    assert not made


def test_a_data_file_that_shrinks_is_reported_and_not_looked_behind(path):
    source = TokenSource(path)
    read_samples(source, np.arange(3))
    data = path.with_suffix(".bin")
    os.truncate(data, 100)
    with pytest.raises(TruncatedError, match=r"corpus\.bin: ends at byte 100"):
        read_samples(source, np.arange(len(source)))


def test_positions_begin_anew_with_each_document():
    sample = TokensSample(
        __key__="0", tokens=np.arange(6), cu_seqlens=np.array([0, 2, 6], np.int32)
    )
    assert sample.positions.tolist() == [0, 1, 0, 1, 2, 3]


def test_positions_of_a_batch_have_the_shape_of_its_tokens(path):
    samples = get_train_dataset(path, worker_config=config(), batch_size=4, shuffle_buffer_size=8)
    batch = next(iter(samples))
    lengths = [int(edges[-1]) for edges in batch.cu_seqlens]
    assert len(set(lengths)) > 1
    assert batch.positions.shape == tuple(batch.tokens.shape)
    for row, length in zip(batch.positions, lengths, strict=True):
        assert row.tolist()[:length] == list(range(length))


def test_an_epoch_holds_each_window_once(path):
    dataset = get_train_dataset(
        sequence(path, 16), worker_config=config(lanes=4), batch_size=3, repeat=False
    )
    keys = [int(key) for batch in dataset for key in batch.__key__]
    assert sorted(keys) == list(range(TOTAL // 16))
    assert keys != sorted(keys)


def test_info_counts_tokens(path):
    about = json.loads(run("info", path, "--json").output)
    assert (about["samples"], about["tokens"], about["dtypes"]) == (200, TOTAL, ["uint16"])
    assert f"tokens: {TOTAL}" in run("info", path).output


def test_remote_files_are_read_by_ranges(path, s3):
    for suffix in (".idx", ".bin"):
        there = join_address(s3.address, f"corpus{suffix}")
        write_bytes(there, path.with_suffix(suffix).read_bytes())
    for name in ("corpus.bin", "corpus", "."):
        assert dataset_kind(join_address(s3.address, name)) == "tokens"
        source = pickle.loads(pickle.dumps(TokenSource(join_address(s3.address, name))))
        assert tokens_of(source) == numbered(LENGTHS)
    there = sequence(join_address(s3.address, "corpus.idx"), 16)
    batches = []
    for document in (sequence(path, 16), there):
        dataset = get_train_dataset(document, worker_config=config(), batch_size=4)
        batches.append([batch.tokens.tolist() for batch in islice(dataset, 40)])
    assert batches[0] == batches[1]


def damaged(path, change):
    data = bytearray(path.read_bytes())
    changed = change(data)
    data = data if changed is None else changed
    path.write_bytes(data)


def pack_into(form, offset, *values):
    return lambda data: struct.pack_into(form, data, offset, *values)


N = len(LENGTHS)
LENGTHS_AT, POINTERS_AT, DOCUMENTS_AT = 34, 34 + 4 * N, 34 + 12 * N


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        (lambda data: b"", FormatError, "begins with b''"),
        (lambda data: b"PK\x03\x04" + data, FormatError, "it is not an index of a token file"),
        (lambda data: data[:20], TruncatedError, "has 20 bytes, not a complete header"),
        (lambda data: data[:-1], TruncatedError, "200 sequences and 200 documents take"),
        (lambda data: data + b"123", FormatError, "it is damaged, write it again"),
        (pack_into("<Q", 9, 2), FormatError, "has version 2, expected 1"),
        (pack_into("<B", 17, 99), FormatError, r"unknown type 99; expected 1 \(uint8\)"),
        (pack_into("<Q", 18, 1 << 31), TruncatedError, "2147483648 sequences"),
        (pack_into("<Q", 18, (1 << 64) - 1), TruncatedError, "18446744073709551615 sequences"),
        (pack_into("<Q", 26, 0), FormatError, "it has no end of documents"),
        (pack_into("<q", DOCUMENTS_AT, 1), FormatError, "its documents are those of"),
        (pack_into("<q", DOCUMENTS_AT + 8, 1 << 40), FormatError, "documents do not ascend"),
        (pack_into("<i", LENGTHS_AT, -1), FormatError, "negative length"),
        (pack_into("<q", POINTERS_AT, -2), FormatError, "begins at byte -2, where no token of 2"),
        (pack_into("<q", POINTERS_AT, 3), FormatError, "begins at byte 3, where no token of 2"),
        (pack_into("<q", POINTERS_AT, 1 << 40), ShardChangedError, "do not belong together"),
    ],
)
def test_a_damaged_index_is_reported(path, change, error, problem):
    damaged(path, change)
    with pytest.raises(error, match=problem):
        read_samples(TokenSource(path), np.arange(2))


def test_windows_over_a_damaged_index_are_reported(path):
    data = path.read_bytes()
    for at, form, value in (
        (DOCUMENTS_AT + 8, "<q", 1 << 40),
        (LENGTHS_AT + 4, "<i", -5),
        (POINTERS_AT + 4 * 8, "<q", 1 << 40),
        (POINTERS_AT + 4 * 8, "<q", -8),
    ):
        path.write_bytes(data)
        damaged(path, pack_into(form, at, value))
        with pytest.raises(FormatError, match=r"corpus\.idx: "):
            tokens_of(TokenSource(path, options=TokenOptions("sequence", 16)))


def test_windows_over_sequences_that_are_apart_are_reported(tmp_path):
    """The last sequence of a document has moved, so its tokens are no longer one run."""
    path = write_tokens(tmp_path / "apart", [[[1, 2], [3, 4]], [[5, 6]]])
    damaged(path, pack_into("<q", LENGTHS_AT + 4 * 3 + 8, 6))
    with pytest.raises(FormatError, match=r"apart\.idx: sequences .* do not follow each other"):
        tokens_of(TokenSource(path, options=TokenOptions("sequence", 2)))


def test_files_that_do_not_belong_together_are_reported(path, tmp_path):
    data = path.with_suffix(".bin")
    whole = data.read_bytes()
    for content in (whole[:-2], whole + b"12", b""):
        data.write_bytes(content)
        with pytest.raises(ShardChangedError, match="copy both again"):
            TokenSource(path)
    data.unlink()
    with pytest.raises(DatasetNotFoundError, match=r"corpus\.bin does not exist; .*in pairs"):
        TokenSource(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetNotFoundError, match="has no token files"):
        TokenSource(tmp_path / "empty")


def test_nothing_to_read_is_an_error(tmp_path, path):
    empty = write_tokens(tmp_path / "empty" / "x", [])
    with pytest.raises(EmptyDatasetError, match="has 0 of 0 documents"):
        TokenSource(empty)
    with pytest.raises(EmptyDatasetError, match="tokens, fewer than one window of 100000"):
        TokenSource(path, options=TokenOptions("sequence", 100_000))
    blank = write_tokens(tmp_path / "blank" / "x", [[], []])
    assert tokens_of(TokenSource(blank)) == [[], []]
    with pytest.raises(EmptyDatasetError, match="with 0 tokens"):
        TokenSource(blank, options=TokenOptions("sequence", 1))


def test_excluded_and_narrowed_samples_keep_their_keys(path):
    source = TokenSource(
        path, SampleSelection(subsets=[("0%", "50%")], exclude=["1", "corpus.bin/3"])
    )
    assert len(source) == 98
    assert [sample["__key__"] for sample in read_samples(source, np.arange(3))] == ["0", "2", "4"]
    assert source.find("3") == []
    assert source.find("4") == [2]


def test_fingerprints_tell_contents_apart(path):
    first = TokenSource(path).fingerprint()
    assert TokenSource(path).fingerprint() == first
    others = [
        TokenSource(path, SampleSelection(exclude=["1"])),
        TokenSource(path, options=TokenOptions("sequence", 16)),
        TokenSource(path, options=TokenOptions("sequence", 16, seed=1)),
        TokenSource(path, options=TokenOptions("sequence", 17, overlap=1)),
    ]
    digests = {json.dumps(source.fingerprint()) for source in others}
    assert len(digests) == 4
    assert json.dumps(first) not in digests


MEASURE = """
import sys
import numpy as np
from energon.sources.tables.token_files import TokenOptions, TokenSource


def peak():
    with open("/proc/self/status") as status:
        return int(status.read().split("VmHWM:")[1].split()[0]) * 1024


before = peak()
source = TokenSource(sys.argv[1], options=TokenOptions("sequence", 2049, overlap=1))
source.read(np.linspace(0, len(source) - 1, 64).astype(int)).samples(0, 64)
print(len(source), peak() - before)
"""


def test_windows_over_a_long_index_take_next_to_no_memory(tmp_path):
    """An index of 3 million documents, 60 MB, whose tokens are a hole in the file.

    File systems cache files in folios of up to 2 MB, and reading one number maps all of its folio.
    """
    lengths = np.random.default_rng(0).integers(100, 901, 3_000_000).astype(np.int32)
    with open(tmp_path / "long.idx", "wb") as file:
        file.writelines(token_index_bytes(np.dtype("<u2"), lengths))
    tokens = int(lengths.sum(dtype=np.int64))
    with open(tmp_path / "long.bin", "wb") as file:
        file.truncate(2 * tokens)
    found = run_python(MEASURE, tmp_path / "long").stdout.split()
    assert int(found[0]) == (tokens - 1) // 2048
    assert int(found[1]) < 30 << 20
