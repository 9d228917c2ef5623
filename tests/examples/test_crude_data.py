"""Examples of crude data, auxiliary data and cache pools, as programs have them.

Cookers call `.decode()` on texts, so the text parts are left as bytes here: by default they are
decoded already. Where an example takes a field by another name than the one that its sample has,
or decodes a lazy, it is corrected.
"""

from __future__ import annotations

import shutil
from typing import List  # noqa: UP035 - as programs have it

import pytest

from energon.prepare.dataset import prepare_dataset
from megatron.energon import (
    CachePool,
    Cooker,
    DefaultTaskEncoder,
    FileStore,
    FileStoreCachePool,
    Lazy,
    Sample,
    SampleDecoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from tests.datasets import write_shard

N = 9


DECODER = SampleDecoder(decoders={"txt": None, "add_txt_fname": bytes.decode})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A primary dataset of texts that name files, which another dataset and a folder have."""
    folder = tmp_path_factory.mktemp("crude")
    primary = [
        (f"p{n}", {"txt": f"text {n}".encode(), "add_txt_fname": f"a{n}.txt".encode()})
        for n in range(N)
    ]
    write_shard(folder / "my_pimary_ds" / "0.tar", primary)
    aux = [(f"a{n}", {"txt": f"more {n}".encode()}) for n in range(N)]
    write_shard(folder / "aux_ds123" / "0.tar", aux)
    for name in ("my_pimary_ds", "aux_ds123"):
        prepare_dataset(folder / name, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    (folder / "images").mkdir()
    (folder / "images" / "0.bin").write_bytes(b"image")
    shutil.copytree(folder / "aux_ds123", folder / "bucket/path/ds")
    (folder / "msc.yaml").write_text(MSC_YAML.format(bucket=folder / "bucket"))
    (folder / "aux.yaml").write_text(AUX_YAML.format(absolute=folder / "images"))
    (folder / "one_aux.yaml").write_text(ONE_AUX_YAML)
    return folder


AUX_YAML = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    path: ./my_pimary_ds
    aux:
      foo_bar_source: ./aux_ds123
      fs_source: filesystem://./images
      fs_source_abs: filesystem://{absolute}
      remote_source: msc://mybucket/path/ds
    subflavors:
      crude_type: my_dual_aux_example
"""
MSC_YAML = """
profiles:
  mybucket:
    storage_provider:
      type: file
      options:
        base_path: {bucket}
"""
ONE_AUX_YAML = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    path: ./my_pimary_ds
    aux:
      foo_bar_source: ./aux_ds123
"""


def texts(path, encoder, count=N, *, num_workers=0, cache_pool=None, **settings):
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        task_encoder=encoder,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        **{"batch_size": 1, "repeat": False, **settings},
    )
    with get_savable_loader(dataset, cache_pool=cache_pool) as loader:
        return sorted(text for batch in loader for text in batch.text)


def encoder_of(cook, **has):
    class MyTaskEncoder(DefaultTaskEncoder):
        cookers = [Cooker(cook, **has)]  # noqa: RUF012 - as programs have it
        decoder = DECODER

    return MyTaskEncoder()


EXPECTED = [f"text {n} + more {n}" for n in range(N)]


@pytest.mark.parametrize("noted", [False, True])
def test_a_cooker_reads_an_auxiliary_source(folder, noted):
    seen = []

    def cook_text(sample: dict, foo_bar_source: FileStore) -> TextSample:
        if noted:
            additional_text = foo_bar_source.get(sample["add_txt_fname"], sample)
        else:
            additional_text = foo_bar_source.get(sample["add_txt_fname"])
        seen.append(sample)
        return TextSample(
            **basic_sample_keys(sample),
            text=f"{sample['txt'].decode()} + {additional_text.decode()}",
        )

    assert texts(folder / "one_aux.yaml", encoder_of(cook_text)) == EXPECTED
    sources = [source.dataset_path for source in seen[0]["__sources__"]]
    assert [path.rpartition("/")[2] for path in sources] == [
        "my_pimary_ds",
        *(["aux_ds123"] if noted else []),
    ]


def test_a_cooker_gets_all_sources_by_their_names(folder, monkeypatch):
    monkeypatch.setenv("MSC_CONFIG", str(folder / "msc.yaml"))

    def cook_text(
        sample: dict,
        foo_bar_source: FileStore,
        fs_source: FileStore,
        fs_source_abs: FileStore,
        remote_source: FileStore,
    ) -> TextSample:
        assert fs_source.get("0.bin") == fs_source_abs.get("0.bin") == b"image"
        names = (foo_bar_source, remote_source)
        first, second = (source.get(sample["add_txt_fname"]).decode() for source in names)
        assert first == second
        return TextSample(**basic_sample_keys(sample), text=f"{sample['txt'].decode()} + {first}")

    encoder = encoder_of(cook_text, has_subflavors={"crude_type": "my_dual_aux_example"})
    assert texts(folder / "aux.yaml", encoder) == EXPECTED


def test_a_cooker_reads_its_own_dataset_by_name(folder):
    @cooker(need_primary=True)
    def cook_text(sample: dict, primary: FileStore, foo_bar_source: FileStore) -> TextSample:
        mine = primary.get(f"{sample['__key__']}.txt")
        additional_text = foo_bar_source.get(sample["add_txt_fname"])
        return TextSample(
            **basic_sample_keys(sample),
            text=f"{mine.decode()} + {additional_text.decode()}",
        )

    assert texts(folder / "one_aux.yaml", encoder_of(cook_text)) == EXPECTED


@edataclass
class LazyTextSample(Sample):
    text: str
    secondary_text: Lazy[str]


@cooker(need_cache=True)
def cook_lazily(sample: dict, foo_bar_source: FileStore, cache: CachePool) -> LazyTextSample:
    additional_text = cache.get_lazy(foo_bar_source, sample["add_txt_fname"])
    return LazyTextSample(
        **basic_sample_keys(sample),
        text=sample["txt"].decode(),
        secondary_text=additional_text,  # Pass the lazy object on
    )


class LazyTaskEncoder(DefaultTaskEncoder):
    cookers = [Cooker(cook_lazily)]  # noqa: RUF012 - as programs have it
    decoder = DECODER

    def select_samples_to_pack(self, samples):
        return [samples[start : start + 2] for start in range(0, len(samples), 2)]

    @stateless
    def pack_selected_samples(self, samples: List[LazyTextSample]) -> TextSample:  # noqa: UP006
        # Get the real object now:
        texts = [
            f"{sample.text}|{sample.secondary_text.get(sample).decode()}" for sample in samples
        ]
        return TextSample.derive_from(
            samples[0],
            text=" & ".join(texts),
        )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cache_pool_fetches_what_packs_will_need(folder, tmp_path, num_workers):
    pool = FileStoreCachePool(parent_cache_dir=tmp_path / "cache", num_workers=1)
    (tmp_path / "cache").mkdir(exist_ok=True)
    packs = texts(
        folder / "one_aux.yaml",
        LazyTaskEncoder(),
        num_workers=num_workers,
        cache_pool=pool,
        packing_buffer_size=5,
    )
    found = [text for pack in packs for text in pack.split(" & ")]
    assert sorted(found) == [f"text {n}|more {n}" for n in range(N)]


def test_lazies_work_without_a_cache_pool(folder):
    packs = texts(folder / "one_aux.yaml", LazyTaskEncoder(), packing_buffer_size=5)
    assert len([text for pack in packs for text in pack.split(" & ")]) == N
