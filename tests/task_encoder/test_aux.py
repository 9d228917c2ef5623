from __future__ import annotations

import json

import pytest

from energon import (
    ConfigError,
    Cooker,
    DefaultTaskEncoder,
    Sample,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_val_dataset,
)
from energon.cache.file_pool import FileStoreCachePool
from energon.cache.pool import DirectLazy, Lazy, NoCachePool
from energon.prepare.dataset import prepare_dataset
from energon.samples.crude import CrudeSample
from energon.task_encoder.cooker import cooker
from energon.testing import check_resume
from tests.datasets import write_shard
from tests.task_encoder.runs import config
from tests.waiting import wait_until

N = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A primary dataset of names, media in another dataset, captions in a folder."""
    root = tmp_path_factory.mktemp("polylithic")
    names = [
        (f"p{n}", {"json": json.dumps({"media": f"m{n % 5}.bin", "text": f"{n}.txt"}).encode()})
        for n in range(N)
    ]
    write_shard(root / "primary" / "0.tar", names)
    write_shard(root / "media" / "0.tar", [(f"m{n}", {"bin": bytes([n] * 9)}) for n in range(5)])
    for folder in ("primary", "media"):
        prepare_dataset(
            root / folder, split_parts=["train:.*", "val:.*"], sample_type="CrudeWebdataset"
        )
    for n in range(N):
        path = root / "texts" / f"{n}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text {n}")
    (root / "meta.yaml").write_text(
        """
        __module__: megatron.energon
        __class__: MetadatasetV2
        splits:
          val:
            path: ./primary
            aux:
              media: ./media
              texts: filesystem://./texts
        """
    )
    return root


@edataclass
class Cooked(Sample):
    media: bytes
    text: str


def cook(sample, media, texts):
    return Cooked(
        **basic_sample_keys(sample),
        media=media.get(sample["json"]["media"], sample),
        text=texts.get(sample["json"]["text"], sample),
    )


def encoder_with(function):
    class Encoder(DefaultTaskEncoder):
        cookers = (Cooker(function),)

    return Encoder()


def load(path, function, **settings):
    dataset = get_val_dataset(
        path, worker_config=config(), batch_size=None, task_encoder=encoder_with(function)
    )
    with get_savable_loader(dataset, **settings) as loader:
        return list(loader)


def test_cookers_get_a_store_for_each_aux_entry(root):
    samples = load(root / "meta.yaml", cook)
    assert [sample.text for sample in samples] == [f"text {n}" for n in range(N)]
    assert [sample.media for sample in samples] == [bytes([n % 5] * 9) for n in range(N)]


def test_what_went_into_a_sample_is_noted_in_it(root):
    def cook_noting(sample, media, texts):
        media.get(sample["json"]["media"], sample)
        texts.get(sample["json"]["text"], sample)
        return Cooked(**basic_sample_keys(sample), media=b"", text="")

    sample = load(root / "meta.yaml", cook_noting)[7]
    assert [source.dataset_path for source in sample.__sources__] == [
        str(root / folder) for folder in ("primary", "media", "texts")
    ]
    assert [source.file_names for source in sample.__sources__] == [
        ("p7.json",),
        ("m2.bin",),
        ("7.txt",),
    ]


@pytest.mark.parametrize("as_generator", [False, True])
def test_sources_are_noted_whenever_the_sample_took_over_those_of_the_crude_one(root, as_generator):
    def cook_first(sample, media, texts):
        cooked = Cooked(**basic_sample_keys(sample), media=b"", text="")
        texts.get(sample["json"]["text"], sample)
        return cooked

    def cook_each(sample, media, texts):
        yield cook_first(sample, media, texts)

    sample = load(root / "meta.yaml", cook_each if as_generator else cook_first)[7]
    assert [source.file_names for source in sample.__sources__] == [("p7.json",), ("7.txt",)]


def test_worker_processes_find_the_same(root):
    dataset = get_val_dataset(
        root / "meta.yaml",
        worker_config=config(num_workers=2),
        batch_size=3,
        task_encoder=encoder_with(cook),
    )
    with get_savable_loader(dataset) as loader:
        texts = [text for batch in loader for text in batch.text]
    assert sorted(texts) == sorted(f"text {n}" for n in range(N))


def test_pipelines_with_auxiliary_data_resume_anywhere(root):
    dataset = get_val_dataset(
        root / "meta.yaml", worker_config=config(), batch_size=5, task_encoder=encoder_with(cook)
    )
    check_resume(dataset.stage)


def test_a_cooker_can_read_its_own_dataset(root):
    @cooker(need_primary=True)
    def cook_primary(sample, primary):
        own = primary.get(".json", sample)
        first = primary.get("p0.json", sample)
        assert own == sample["json"]
        return Cooked(**basic_sample_keys(sample), media=b"", text=first["text"])

    samples = load(root / "primary", cook_primary)
    assert {sample.text for sample in samples} == {"0.txt"}
    assert [s.file_names for s in samples[3].__sources__] == [
        ("p3.json",),
        ("p3.json",),
        ("p0.json",),
    ]


def test_without_a_pool_nothing_is_cached(root):
    pools = []

    @cooker(need_cache=True)
    def cook_lazily(sample, media, texts, cache):
        pools.append(cache)
        lazy = cache.get_lazy(texts, sample["json"]["text"])
        assert isinstance(lazy, DirectLazy)
        return Cooked(**basic_sample_keys(sample), media=b"", text=lazy.get(sample))

    assert load(root / "meta.yaml", cook_lazily)[5].text == "text 5"
    assert isinstance(pools[0], NoCachePool)


def test_cookers_get_the_pool_of_their_loader(root):
    mine, seen = NoCachePool(), []

    @cooker(need_cache=True)
    def cook_noting(sample, media, texts, cache):
        seen.append(cache)
        return Cooked(**basic_sample_keys(sample), media=b"", text="")

    load(root / "meta.yaml", cook_noting, cache_pool=mine)
    assert seen == [mine] * N


@edataclass
class LazyText(Sample):
    text: Lazy


@cooker(need_cache=True)
def cook_later(sample, media, texts, cache):
    return LazyText(**basic_sample_keys(sample), text=cache.get_lazy(texts, sample["json"]["text"]))


class LaterEncoder(DefaultTaskEncoder):
    cookers = (Cooker(cook_later),)

    def encode_sample(self, sample):
        return Sample.derive_from(sample, __key__=sample.text.get(sample))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_share_a_cache_that_leaves_nothing_behind(root, tmp_path, num_workers):
    dataset = get_val_dataset(
        root / "meta.yaml",
        worker_config=config(num_workers=num_workers),
        batch_size=3,
        task_encoder=LaterEncoder(),
    )
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=2)
    with get_savable_loader(dataset, cache_pool=pool) as loader:
        texts = [text for batch in loader for text in batch.__key__]
        assert len(list(tmp_path.iterdir())) == 1
    assert sorted(texts) == sorted(f"text {n}" for n in range(N))
    pool.close()
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_packing_finds_its_files_fetched_since_the_next_window_is_cooked_ahead(root, tmp_path):
    events, asked = [], set()
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=2)

    @cooker(need_cache=True)
    def cook_noting(sample, media, texts, cache):
        name = sample["json"]["text"]
        events.append(("cook", name))
        asked.add(name)
        return cook_later(sample, media, texts, cache)

    class Packing(DefaultTaskEncoder):
        cookers = (Cooker(cook_noting),)

        def select_samples_to_pack(self, samples):
            return [samples[:2], samples[2:]]

        def pack_selected_samples(self, samples):
            wait_until(lambda: pool.usage()[1] == len(asked))  # nobody has taken any of them yet
            texts = [sample.text.get(sample) for sample in samples]
            events.append(("pack", *texts))
            return Sample.derive_from(samples[0])

    dataset = get_val_dataset(
        root / "meta.yaml",
        worker_config=config(),
        batch_size=1,
        packing_buffer_size=4,
        task_encoder=Packing(),
    )
    with get_savable_loader(dataset, cache_pool=pool) as loader:
        assert len(list(loader)) == 6
    packs = [place for place, event in enumerate(events) if event[0] == "pack"]
    cooked = {event[1]: place for place, event in enumerate(events) if event[0] == "cook"}
    for number, place in enumerate(packs[2:], start=2):
        names = [text.removeprefix("text ") + ".txt" for text in events[place][1:]]
        assert all(cooked[name] < packs[number - 1] for name in names)
    assert pool.stats() == {"hits": N, "misses": 0}
    pool.close()


def test_a_cooker_that_does_not_take_an_aux_is_refused_at_once(root):
    def one_store(sample, media):
        return CrudeSample(sample)

    with pytest.raises(ConfigError, match=r"primary/val: cooker one_store.*unexpected.*'texts'"):
        load(root / "meta.yaml", one_store)


def test_a_cooker_that_wants_more_than_there_is_is_refused_at_once(root):
    def three_stores(sample, media, texts, other):
        return CrudeSample(sample)

    with pytest.raises(ConfigError, match="missing a required argument: 'other'"):
        load(root / "meta.yaml", three_stores)


def test_a_missing_auxiliary_dataset_is_named_with_its_place(root, tmp_path):
    (tmp_path / "meta.yaml").write_text(
        f"splits:\n  val:\n    path: {root}/primary\n    aux:\n      media: ./nowhere\n"
    )
    with pytest.raises(FileNotFoundError, match=r"meta.yaml:\d+.*aux 'media'.*nowhere"):
        load(tmp_path / "meta.yaml", cook)


def test_a_missing_file_is_the_fault_of_one_sample(root):
    def cook_some(sample, media, texts):
        name = "absent.txt" if sample["__key__"] == "p4" else sample["json"]["text"]
        return Cooked(**basic_sample_keys(sample), media=b"", text=texts.get(name, sample))

    samples = load(root / "meta.yaml", cook_some)
    assert [sample.__key__ for sample in samples] == [f"p{n}" for n in range(N) if n != 4]
