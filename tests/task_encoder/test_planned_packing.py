"""Packs that are planned by what the index knows, before their media are read."""

from __future__ import annotations

import pytest

from energon import (
    Cooker,
    DecodeFileStore,
    DefaultTaskEncoder,
    Lazy,
    NoSuchFileError,
    Packer,
    Sample,
    SampleDecoder,
    SystemFileStore,
    basic_sample_keys,
    cooker,
    edataclass,
)
from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from energon.sources.files.samples import WebdatasetFileStore
from energon.sources.tables.jsonl import JsonlFileStore
from tests.datasets import write_shard
from tests.task_encoder.runs import one_lane, val

WINDOW = 32


@edataclass
class Planned(Sample):
    size: int
    media: Lazy


@cooker(need_primary=True, need_cache=True)
def plan(sample, primary, cache):
    media = cache.get_lazy(primary, ".bin")
    return Planned(**basic_sample_keys(sample), size=primary.get_size(".bin"), media=media)


class Encoder(DefaultTaskEncoder):
    cookers = (Cooker(plan),)
    select_samples_to_pack = Packer(100, lambda sample: sample.size, carry=False)

    def __init__(self):
        super().__init__()
        self.read = 0
        self.decoder = SampleDecoder(decoders={"bin": self.count})

    def count(self, data):
        self.read += 1
        return len(data)

    def postencode_sample(self, sample):
        return sample.media.get(sample)

    def pack_selected_samples(self, samples):
        return samples


@pytest.fixture
def root(tmp_path):
    samples = [(f"s{n}", {"bin": bytes(10 + n % 17), "txt": b"text"}) for n in range(2 * WINDOW)]
    write_shard(tmp_path / "ds" / "0.tar", samples)
    prepare_dataset(tmp_path / "ds", split_parts=["val:.*"], sample_type="CrudeWebdataset")
    (tmp_path / "ds/.nv-meta/texts.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\npart_filter: [txt]\n"
    )
    return tmp_path / "ds"


def test_media_are_read_for_packs_that_leave_and_no_others(root):
    encoder = Encoder()
    dataset = val(
        root, encoder, batch_size=None, packing_buffer_size=WINDOW, dataset_config="texts.yaml"
    )
    (first,), _ = one_lane(dataset, 1)
    assert encoder.read == len(first) < WINDOW
    packs, _ = one_lane(dataset)
    assert sum(len(pack) for pack in packs) == 2 * WINDOW
    assert all(sum(pack) <= 100 for pack in packs)


def test_stores_know_the_sizes_of_their_files(root, tmp_path):
    (tmp_path / "lines.jsonl").write_bytes(b'{"a": 1}\n{"a": 22}\n')
    prepare_jsonl(tmp_path / "lines.jsonl")
    stores = {
        WebdatasetFileStore(root): ("s3.bin", 13),
        DecodeFileStore(WebdatasetFileStore(root), decoder=SampleDecoder()): ("s3.txt", 4),
        SystemFileStore(tmp_path): ("lines.jsonl", 19),
        JsonlFileStore(tmp_path / "lines.jsonl"): ("1.json", 9),
    }
    for store, (name, size) in stores.items():
        assert store.get_size(name) == size
        with pytest.raises(NoSuchFileError):
            store.get_size("nothing.bin")
