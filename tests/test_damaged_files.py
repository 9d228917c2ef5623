"""Whatever happens to the files of a dataset: its samples, or an error of ours; nothing else."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon.errors import EnergonError
from tests.datasets import make_captions

TOKENS = [b"- ", b"{", b": ", b'"', b"\n", b"9999999999", b"-1", b"\0\0\0\0", b"\xff"]


class Captions(DefaultTaskEncoder):
    def batch(self, samples):
        return [(sample.__key__, sample.caption) for sample in samples]


def read(root):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=2)
    dataset = get_train_dataset(
        root,
        worker_config=config,
        batch_size=3,
        shuffle_buffer_size=None,
        max_samples_per_sequence=4,
        task_encoder=Captions(),
    )
    batches = zip(range(8), get_savable_loader(dataset), strict=False)
    return [pair for _, batch in batches for pair in batch]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("damaged") / "ds"
    make_captions(root, [6, 5, 7])
    return root, read(root)


def damage(draw, file):
    """Change a file somewhere, with or without a trace in its date."""
    about, data = file.stat(), bytearray(file.read_bytes())
    how = draw(st.sampled_from(["delete", "cut", "flip", "insert", "overwrite"]))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    if how == "delete":
        file.unlink()
        return
    if how == "cut":
        del data[at:]
    elif how == "flip":
        data[at] ^= 1 << draw(st.integers(0, 7))
    elif how == "insert":
        data[at:at] = draw(st.sampled_from(TOKENS))
    else:
        data[at : at + 4] = draw(st.sampled_from(TOKENS))
    file.write_bytes(data)
    if draw(st.booleans()):
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_is_an_error_of_ours_or_harmless(whole, tmp_path_factory, data):
    root, samples = whole
    # Shards are left alone: that a bit of a content has changed nobody can see without the
    # checksums that `energon verify` compares.
    files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".tar"]
    copy = tmp_path_factory.mktemp("copy") / "ds"
    shutil.copytree(root, copy)
    damage(data.draw, copy / data.draw(st.sampled_from(sorted(files))).relative_to(root))
    try:
        found = read(copy)
    except EnergonError:
        pass
    else:
        assert set(found) <= set(samples)
    finally:
        shutil.rmtree(copy)
