"""Small programs for webdataset: run with any package that has its interface, on one folder.

Each `check_…` takes the package and a folder of shards and returns what it found. Nothing here
depends on random order: what is shuffled is sorted. Samples have the fields txt, cls and json;
there are 4 shards of 5.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import tarfile
from importlib import import_module
from itertools import islice
from pathlib import Path

import numpy as np


def setup(folder):
    """Write the shards that all checks read."""
    for shard in range(4):
        members = []
        for n in range(5 * shard, 5 * shard + 5):
            members += [
                (f"{n:04}.txt", f"text {n}".encode()),
                (f"{n:04}.cls", str(n % 3).encode()),
                (f"{n:04}.json", json.dumps({"n": n}).encode()),
            ]
        write_tar(Path(folder) / f"shard-{shard:06}.tar", members)
    image = io.BytesIO()
    from PIL import Image

    Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10).save(image, "PNG")
    array = io.BytesIO()
    np.save(array, np.arange(6).reshape(2, 3))
    members = [
        ("d/a.png", image.getvalue()),
        ("d/a.left.png", image.getvalue()),
        ("d/a.npy", array.getvalue()),
        ("d/a.txt.gz", gzip.compress(b"packed")),
        ("d/a.PYD", pickle.dumps([1])),
        ("d/a.xyz", b"?"),
        ("__skipped__/b.txt", b"meta"),
        ("d/b", b"no extension"),
    ]
    write_tar(Path(folder) / "media.tar", members)


def write_tar(path, members):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def shards(folder):
    return str(Path(folder) / "shard-{000000..000003}.tar")


def first(folder):
    return str(Path(folder) / "shard-000000.tar")


def module(wds, name):
    return import_module(f"{wds.__name__}.{name}")


def keys(samples):
    return [sample["__key__"] for sample in samples]


def raised(function, *args, **kw):
    """Which of the usual exceptions a call raises: the first that programs may wait for."""
    kinds = (tarfile.ReadError, KeyError, TypeError, AttributeError, OSError, ValueError)
    try:
        function(*args, **kw)
    except Exception as error:
        return next((kind.__name__ for kind in kinds if isinstance(error, kind)), "Exception")
    return None


def plain(wds, folder, **kw):
    return wds.WebDataset(shards(folder), shardshuffle=False, **kw)


# Reading


def check_samples(wds, folder):
    sample = next(iter(plain(wds, folder)))
    return sorted(sample), sample["txt"], os.path.basename(sample["__url__"])


def check_order(wds, folder):
    return keys(plain(wds, folder))


def check_shuffled_shards_have_all_samples(wds, folder):
    return sorted(keys(wds.WebDataset(shards(folder), shardshuffle=100).shuffle(10)))


def check_a_list_of_shards(wds, folder):
    urls = [first(folder), str(Path(folder) / "shard-000002.tar")]
    return keys(wds.WebDataset(urls, shardshuffle=False))


def check_concatenated_patterns(wds, folder):
    urls = f"{folder}/shard-000003.tar::{folder}/shard-00000{{0..1}}.tar"
    return keys(wds.WebDataset(urls, shardshuffle=False))


def check_variables_in_addresses(wds, folder):
    os.environ["WDS_PLACE"] = str(folder)
    return keys(wds.WebDataset("${PLACE}/shard-000001.tar", shardshuffle=False))


def check_select_and_rename_files(wds, folder):
    dataset = plain(
        wds,
        folder,
        select_files=lambda name: name.endswith("label"),
        rename_files=lambda name: name.replace(".cls", ".label"),
    )
    return sorted(next(iter(dataset)))


def check_a_dataset_is_iterated_again(wds, folder):
    dataset = plain(wds, folder)
    return keys(dataset) == keys(dataset)


def check_resampled_shards_have_no_end(wds, folder):
    dataset = wds.WebDataset(shards(folder), resampled=True)
    return len(list(islice(dataset, 100)))


def check_resampled_epochs(wds, folder):
    dataset = wds.WebDataset(shards(folder), resampled=True).with_epoch(13)
    return [len(list(dataset)) for _ in range(3)]


def check_compressed_shards(wds, folder):
    path = Path(folder) / "packed.tar.gz"
    path.write_bytes(gzip.compress(Path(first(folder)).read_bytes()))
    return keys(wds.WebDataset(str(path), shardshuffle=False))


def check_no_samples_is_an_error(wds, folder):
    write_tar(Path(folder) / "empty.tar", [])
    urls = f"{folder}/empty.tar"
    found = raised(list, wds.WebDataset(urls, shardshuffle=False))
    return found, list(wds.WebDataset(urls, shardshuffle=False, empty_check=False))


def check_a_missing_shard(wds, folder):
    urls = [first(folder), f"{folder}/none.tar"]
    handler = wds.ignore_and_continue
    return (
        raised(list, wds.WebDataset(urls, shardshuffle=False)),
        keys(wds.WebDataset(urls, shardshuffle=False, handler=handler)),
    )


def check_a_damaged_shard(wds, folder):
    path = Path(folder) / "damaged.tar"
    path.write_bytes(b"x" * 3000)
    urls = [str(path), first(folder)]
    handler = wds.ignore_and_continue
    return (
        raised(list, wds.WebDataset(urls, shardshuffle=False)),
        keys(wds.WebDataset(urls, shardshuffle=False, handler=handler)),
    )


def check_duplicate_fields(wds, folder):
    path = Path(folder) / "twice.tar"
    write_tar(path, [("a.txt", b"1"), ("a.txt", b"2"), ("b.txt", b"3")])
    url = str(path)
    handler = wds.ignore_and_continue
    tolerant = wds.WebDataset(url, shardshuffle=False, handler=handler)
    return (
        raised(list, wds.WebDataset(url, shardshuffle=False)),
        [(sample["__key__"], sample["txt"]) for sample in tolerant],
    )


def check_warnings(wds, folder):
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = plain(wds, folder).map(lambda s: 1 // 0, handler=wds.warn_and_stop)
        return list(dataset), len(caught) >= 1


# Pipelines


def check_an_explicit_pipeline(wds, folder):
    dataset = wds.DataPipeline(
        wds.SimpleShardList(shards(folder)),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.decode(),
        wds.to_tuple("txt", "cls"),
        wds.batched(8),
    )
    return [(texts, labels.tolist()) for texts, labels in dataset]


def check_a_pipeline_as_open_clip_has_it(wds, folder):
    class detshuffle2(wds.PipelineStage):
        def __init__(self, bufsize=1000, initial=100, seed=0, epoch=-1):
            self.bufsize, self.initial, self.seed, self.epoch = bufsize, initial, seed, epoch

        def run(self, src):
            self.epoch += 1
            rng = random.Random(self.seed + self.epoch)
            return module(wds, "filters")._shuffle(src, self.bufsize, self.initial, rng)

    tariterators = module(wds, "tariterators")

    def group_by_keys_nothrow(data, handler=None):
        current = None
        for member in data:
            prefix, suffix = tariterators.base_plus_ext(member["fname"])
            if current is None or prefix != current["__key__"]:
                if tariterators.valid_sample(current):
                    yield current
                current = {"__key__": prefix, "__url__": member["__url__"]}
            current[suffix] = member["data"]
        if tariterators.valid_sample(current):
            yield current

    def tarfile_to_samples_nothrow(src, handler=wds.reraise_exception):
        streams = tariterators.url_opener(src, handler=handler)
        files = tariterators.tar_file_expander(streams, handler=handler, eof_value=None)
        return group_by_keys_nothrow(files, handler=handler)

    class Resampled2(module(wds, "pytorch").IterableDataset):
        def __init__(self, urls):
            super().__init__()
            self.urls = module(wds, "shardlists").expand_urls(urls)

        def __iter__(self):
            for url in self.urls:
                yield {"url": url}

    pipeline = [Resampled2(shards(folder))]
    pipeline.extend([detshuffle2(bufsize=10, initial=2, seed=1), wds.split_by_node])
    pipeline.extend([wds.split_by_worker, tarfile_to_samples_nothrow])
    pipeline.extend([wds.shuffle(bufsize=5, initial=2)])
    pipeline.extend(
        [
            wds.select(lambda sample: "txt" in sample),
            wds.decode("pilrgb", handler=wds.warn_and_continue),
            wds.rename(image="json", text="txt"),
            wds.map_dict(image=lambda image: image["n"], text=str.upper),
            wds.to_tuple("image", "text"),
            wds.batched(5, partial=False),
        ]
    )
    dataset = wds.DataPipeline(*pipeline)
    dataset = dataset.with_epoch(4)
    batches = list(dataset)
    return len(batches), sorted(n for numbers, _ in batches for n in numbers.tolist())


def check_a_mixture_as_4d_humans_has_it(wds, folder):
    class Mixed(wds.WebDataset):
        def __init__(self, urls):
            super(wds.WebDataset, self).__init__()
            parts = [wds.WebDataset(url, shardshuffle=False) for url in urls]
            parts = [part.decode().rename(image="png;txt") for part in parts]
            self.append(wds.RandomMix(parts, [0.9, 0.1], longest=True))

    urls = [first(folder), f"{folder}/shard-000003.tar"]
    dataset = Mixed(urls).map(lambda sample: sample["image"])
    return sorted(dataset)


def check_append_drops_its_result(wds, folder):
    dataset = plain(wds, folder)
    dataset.append(wds.decode())
    dataset.append(wds.map(lambda sample: sample["json"]["n"]))
    dataset.append(wds.select(lambda n: n % 4 == 0))
    return list(dataset)


def check_the_list_of_stages(wds, folder):
    dataset = plain(wds, folder).map(lambda sample: sample["__key__"]).batched(3, None)
    batched = dataset.pipeline.pop()
    dataset.pipeline.append(wds.slice(0, 8, 2))
    before = list(dataset)
    dataset.append(batched)
    return before, list(dataset), dataset.stage(-1) is batched, len(dataset.pipeline) > 2


def check_methods_do_not_change_the_pipeline(wds, folder):
    dataset = plain(wds, folder)
    dataset.map(lambda sample: None)
    dataset.compose(wds.slice(2))
    return len(list(dataset))


def check_with_epoch_changes_the_pipeline(wds, folder):
    dataset = plain(wds, folder)
    same = dataset.with_epoch(7) is dataset
    return same, len(list(dataset)), dataset.nsamples


def check_with_epoch_repeats(wds, folder):
    return len(list(plain(wds, folder).with_epoch(50)))


def check_repeat(wds, folder):
    dataset = plain(wds, folder)
    same = dataset.repeat(2) is dataset
    endless = plain(wds, folder).repeat()
    return same, keys(dataset), len(list(islice(endless, 90))), dataset.repetitions


def check_repeat_up_to_a_number(wds, folder):
    return len(list(plain(wds, folder).repeat(nepochs=5, nbatches=33)))


def check_with_length(wds, folder):
    dataset = plain(wds, folder)
    same = dataset.with_length(17, silent=True) is dataset
    return same, len(dataset), dataset.size, isinstance(dataset, wds.WebDataset), len(keys(dataset))


def check_a_list_as_source(wds, folder):
    return list(wds.DataPipeline(wds.MockDataset({"a": 1}, 3), wds.map(lambda s: s["a"] + 1)))


def check_a_function_as_source(wds, folder):
    def source():
        yield from range(4)

    return list(wds.DataPipeline(source, wds.select(lambda n: n % 2)))


def check_a_generator_function_as_stage(wds, folder):
    def twice(source):
        for sample in source:
            yield sample["__key__"]
            yield sample["__key__"]

    return list(plain(wds, folder).compose(twice).slice(5))


def check_stages_with_run(wds, folder):
    class Doubled(wds.PipelineStage):
        def run(self, source):
            for sample in source:
                yield sample["__key__"] * 2

    return list(plain(wds, folder).compose(Doubled(), wds.slice(2)))


def check_pipelinefilter(wds, folder):
    def repeated(source, times, upper=False):
        for sample in source:
            text = sample["txt"].decode() * times
            yield text.upper() if upper else text

    stage = wds.pipelinefilter(repeated)
    dataset = plain(wds, folder).compose(stage(2, upper=True), wds.slice(2))
    made = stage(3)
    return list(dataset), made.args, made.kw, "repeated" in str(made)


def check_nothing_in_a_pipeline_is_left_out(wds, folder):
    stages = [wds.SimpleShardList(shards(folder)), None, [wds.tarfile_to_samples(), wds.slice(2)]]
    return keys(wds.DataPipeline(*stages))


def check_something_that_is_no_stage(wds, folder):
    return raised(lambda: list(wds.DataPipeline(wds.SimpleShardList(first(folder)), 7)))


def check_context_manager(wds, folder):
    with plain(wds, folder) as dataset:
        return len(keys(islice(dataset, 3)))


def check_a_pipeline_is_a_dataset_of_torch(wds, folder):
    from torch.utils.data import DataLoader, IterableDataset

    dataset = plain(wds, folder).map(lambda sample: sample["__key__"])
    loader = DataLoader(dataset, batch_size=None, num_workers=0)
    sources = [wds.SimpleShardList(first(folder)), wds.ResampledShards(first(folder))]
    return [isinstance(each, IterableDataset) for each in (dataset, *sources)], len(list(loader))


def check_pickled_pipelines(wds, folder):
    dataset = plain(wds, folder).decode().to_tuple("txt", "cls").batched(5)
    return len(list(pickle.loads(pickle.dumps(dataset))))


# Stages


def check_decoded(wds, folder):
    sample = next(iter(plain(wds, folder).decode()))
    return sample["txt"], sample["cls"], sample["json"]


def check_to_tuple(wds, folder):
    dataset = plain(wds, folder).decode()
    return (
        next(iter(dataset.to_tuple("txt", "cls"))),
        next(iter(dataset.to_tuple("txt cls json"))),
        next(iter(dataset.to_tuple("png;jpg;txt", "__key__"))),
        next(iter(dataset.to_tuple("png", "cls", missing_is_error=False))),
        raised(list, dataset.to_tuple("png")),
    )


def check_map_dict(wds, folder):
    dataset = plain(wds, folder).decode()
    sample = next(iter(dataset.map_dict(txt=str.upper, cls=lambda n: n + 1)))
    return sample["txt"], sample["cls"], raised(list, dataset.map_dict(png=len))


def check_map_tuple(wds, folder):
    dataset = plain(wds, folder).decode().to_tuple("txt", "cls")
    return next(iter(dataset.map_tuple(None, str))), next(iter(dataset.map_tuple(len)))


def check_map(wds, folder):
    dataset = plain(wds, folder).map(lambda s: {"x": 1} if int(s["__key__"]) % 2 else None)
    return list(dataset)[:2]


def check_map_handlers(wds, folder):
    def fails(sample):
        if int(sample["__key__"]) == 3:
            raise RuntimeError("three")
        return sample["__key__"]

    dataset = plain(wds, folder)
    return (
        list(dataset.map(fails, handler=wds.ignore_and_continue))[:4],
        list(dataset.map(fails, handler=wds.ignore_and_stop)),
        raised(list, dataset.map(fails)),
    )


def check_select(wds, folder):
    return keys(plain(wds, folder).select(lambda sample: sample["cls"] == b"2"))


def check_rename(wds, folder):
    sample = next(iter(plain(wds, folder).rename(text="txt", label="index;cls")))
    kept = next(iter(plain(wds, folder).rename(text="txt", keep=False)))
    return sorted(sample), sorted(kept), raised(list, plain(wds, folder).rename(image="png"))


def check_rename_keys(wds, folder):
    dataset = plain(wds, folder)
    return (
        sorted(
            next(iter(dataset.rename_keys(("text", "*.txt"), ("text", "txt"), must_match=False)))
        ),
        sorted(next(iter(dataset.rename_keys(label="cls", keep_unselected=True)))),
        raised(list, dataset.rename_keys(image="*.png")),
    )


def check_extract_keys(wds, folder):
    dataset = plain(wds, folder)
    return (
        next(iter(dataset.extract_keys("*.txt", "cls;index"))),
        next(iter(dataset.extract_keys("*.png", "*.txt", ignore_missing=True))),
        raised(list, dataset.extract_keys("*.png")),
    )


def check_xdecode(wds, folder):
    dataset = plain(wds, folder)
    decode = {"cls": lambda stream: int(stream.read()), "json": json.load}
    sample = next(iter(dataset.xdecode(**decode)))
    lax = next(iter(dataset.xdecode(("*.cls", False), must_decode=False)))
    return sample["txt"], sample["cls"], sample["json"], lax["cls"], raised(list, dataset.xdecode())


def check_associate(wds, folder):
    extra = {"0001": {"extra": 1}, "0000": {"extra": 0}}
    dataset = plain(wds, folder).slice(2).compose(wds.associate(extra))
    called = plain(wds, folder).slice(2).compose(wds.associate(lambda key: {"k": key}))
    return [sample["extra"] for sample in dataset], [sample["k"] for sample in called]


def check_batches_of_tuples(wds, folder):
    dataset = plain(wds, folder).decode().to_tuple("txt", "cls", "json")
    texts, labels, documents = next(iter(dataset.batched(3)))
    return texts, labels.tolist(), type(labels).__name__, documents


def check_batches_of_dicts(wds, folder):
    dataset = plain(wds, folder).decode().map(lambda s: {"n": s["json"]["n"], "txt": s["txt"]})
    batch = next(iter(dataset.map(lambda s: {"n": s["n"], "t": s["txt"]}).batched(2)))
    return sorted(batch), batch["n"].tolist(), batch["t"]


def check_partial_batches(wds, folder):
    dataset = plain(wds, folder).decode().to_tuple("cls")
    sizes = [len(labels) for (labels,) in dataset.batched(8)]
    return sizes, len(list(dataset.batched(8, partial=False)))


def check_batches_without_collation(wds, folder):
    dataset = plain(wds, folder).decode().to_tuple("cls", "txt")
    return next(iter(dataset.batched(2, collation_fn=None)))


def check_own_collation(wds, folder):
    dataset = plain(wds, folder).to_tuple("__key__").batched(4, collation_fn=len)
    return list(dataset)


def check_unbatched(wds, folder):
    dataset = plain(wds, folder).decode().to_tuple("txt", "cls").batched(8).unbatched()
    return [(text, int(label)) for text, label in dataset][:3]


def check_unbatched_dicts(wds, folder):
    dataset = wds.DataPipeline(
        wds.MockDataset({"a": np.arange(2), "b": ["x", "y"]}, 1), wds.unbatched()
    )
    return [(int(sample["a"]), sample["b"]) for sample in dataset]


def check_lists(wds, folder):
    dataset = plain(wds, folder).map(lambda s: s["__key__"]).listed(6)
    return [len(each) for each in dataset], len(list(dataset.unlisted()))


def check_slices(wds, folder):
    dataset = plain(wds, folder)
    return keys(dataset.slice(2)), keys(dataset.slice(3, 9, 2))


def check_rsample(wds, folder):
    dataset = plain(wds, folder)
    return len(keys(dataset.rsample(1.0))), len(keys(dataset.rsample(0.0)))


def check_info(wds, folder):
    stream = io.StringIO()
    info = wds.info(n=1, stream=stream, name="here")
    return len(keys(plain(wds, folder).compose(info))), "here" in stream.getvalue()


def check_log_keys(wds, folder):
    path = f"{folder}/log"
    Path(path).unlink(missing_ok=True)
    list(plain(wds, folder).log_keys(path))
    lines = Path(path).read_text().splitlines()
    return len(lines), lines[3].split("\t")[-1]


def check_mcached(wds, folder):
    read = []
    dataset = plain(wds, folder).map(lambda s: read.append(1) or s["__key__"]).mcached()
    return list(dataset) == list(dataset), len(read)


def check_getfirst(wds, folder):
    sample = {"a": 1, "b": 2}
    return (
        wds.getfirst(sample, "x;b"),
        wds.getfirst(sample, ["a"]),
        wds.getfirst(sample, "x", default=5, missing_is_error=False),
        raised(wds.getfirst, sample, "x"),
    )


def check_transform_with(wds, folder):
    return wds.transform_with([1, 2], [str, None]), wds.transform_with([1], None)


def check_functions_behind_stages(wds, folder):
    filters = module(wds, "filters")
    numbers = list(range(7))
    return (
        sorted(filters._shuffle(iter(numbers), 3, 2)),
        sorted(filters._shuffle(iter(numbers), 3, 2, random.Random(1))),
        list(filters._map(numbers, str)),
        list(filters._select(numbers, lambda n: n > 4)),
        list(filters._batched(numbers, 4, None)),
        list(filters._batched(numbers, 4, None, partial=False)),
        list(filters._unlisted([[1], [2, 3]])),
        list(filters._to_tuple([{"a": 1, "b": 2}], "a", "b")),
        list(filters._map_tuple([(1, 2)], None, str)),
        list(filters._map_dict([{"a": 1}], a=str)),
        list(filters._rename([{"a": 1}], b="a")),
        list(filters._associate([{"__key__": "x"}], {"x": {"y": 1}})),
        list(filters._decode([{"__key__": "x", "cls": b"3"}])),
        list(filters._unbatched([([1, 2], [3, 4])])),
        list(filters._extract_keys([{"a.txt": 1}], "*.txt")),
        list(filters._rename_keys([{"a.txt": 1}], ("t", "*.txt"))),
        list(filters._xdecode([{"__key__": "x", "txt": b"t"}])),
    )


def check_small_functions_of_filters(wds, folder):
    filters = module(wds, "filters")
    buffer = [1, 2, 3]
    taken = filters.pick(buffer, random.Random(0))
    return (
        filters.compose(str, len)(123),
        filters.compose2(abs, str)(-3),
        list(filters.pipeline([3, 1], sorted, reversed)),
        filters.parse_field_spec("jpg;png cls"),
        filters.tuple2dict(("a", "b")),
        filters.dict2tuple({0: "a", 1: "b"}),
        filters.combine_values([1, 2]).tolist(),
        filters.combine_values(["a", "b"]),
        filters.combine_values([np.ones(2), np.ones(2)]).shape,
        sorted([taken, *buffer]),
        filters.decode_text(io.BytesIO(b"x")),
        filters.find_decoder(filters.default_decoders, "a.txt") is filters.decode_text,
        filters.find_decoder(filters.default_decoders, "a.png"),
        [pattern for pattern, _ in filters.default_decoders],
    )


def check_shuffle_by_itself(wds, folder):
    stage = wds.shuffle(10, initial=2)
    return sorted(stage(iter(range(20)))), "_shuffle" in str(stage)


def check_detshuffle(wds, folder):
    stage = wds.detshuffle(bufsize=5, initial=2, seed=3)
    fields = stage.bufsize, stage.initial, stage.seed, stage.epoch
    one, other = list(stage.run(iter(range(50)))), list(stage.run(iter(range(50))))
    again = wds.detshuffle(bufsize=5, initial=2, seed=3)
    same = list(again.run(iter(range(50)))) == one
    return fields, stage.epoch, one != other, same, sorted(one) == list(range(50))


# Decoding


def media(wds, folder, *args, **kw):
    dataset = wds.WebDataset(f"{folder}/media.tar", shardshuffle=False)
    dataset = dataset.map(lambda s: {k: v for k, v in s.items() if k != "pyd"})
    return next(iter(dataset.decode(*args, **kw)))


def check_fields_of_media(wds, folder):
    dataset = wds.WebDataset(f"{folder}/media.tar", shardshuffle=False)
    return [sorted(sample) for sample in dataset]


def check_decoded_media(wds, folder):
    sample = media(wds, folder)
    return sample["npy"].tolist(), sample["txt.gz"], sample["xyz"], type(sample["png"]).__name__


def check_images(wds, folder):
    found = []
    for spec in module(wds, "autodecode").imagespecs:
        image = media(wds, folder, spec)["left.png"]
        values = np.asarray(image)
        found.append((spec, list(values.shape), str(values.dtype), round(float(values.mean()), 4)))
    return sorted(found)


def check_imagespecs(wds, folder):
    return sorted(module(wds, "autodecode").imagespecs.items())


def check_an_unknown_image_spec(wds, folder):
    return raised(media, wds, folder, "bgr"), raised(wds.imagehandler, "rgb9")


def check_own_handlers(wds, folder):
    def upper(key, data):
        return data.upper() if key.endswith(".xyz") else None

    length = wds.handle_extension("left.png", len)
    sample = media(wds, folder, length, upper)
    return sample["left.png"] > 0, type(sample["png"]).__name__, sample["xyz"]


def check_only_partial_pre_post(wds, folder):
    sample = {"__key__": "a", "cls": b"1", "txt": b"t", "done": 5}
    decode = module(wds, "autodecode").Decoder
    return (
        decode([], only=["cls"])(dict(sample))["txt"],
        decode([], only="cls txt", partial=True)(dict(sample))["cls"],
        decode([], None, None, None, True)(dict(sample))["done"],
        decode([], [], [])({"__key__": "a", "cls": b"1"})["cls"],
        decode([], post=[lambda key, data: key])({"__key__": "a", "q": b""})["q"],
        raised(decode([]), dict(sample)) is not None,
    )


def check_continue(wds, folder):
    def unwrap(key, data):
        return wds.Continue(key[:-5], data[1:]) if key.endswith(".wrap") else None

    decoder = wds.Decoder([unwrap])
    sample = {"__key__": "a", "cls.wrap": b"x7"}
    return decoder(sample)["cls.wrap"], decoder.decode1("cls.wrap", b"x8")


def check_the_registry_of_decoders(wds, folder):
    decoders = module(wds, "autodecode").decoders
    before = decoders["cls"]
    dataset = plain(wds, folder).decode()
    first_found = next(iter(dataset))["cls"]
    try:
        decoders["cls"] = lambda data: f"class {int(data)}"
        decoders["xyz"] = len
        return (
            first_found,
            next(iter(dataset))["cls"],
            media(wds, folder)["xyz"],
            module(wds, "autodecode").basichandlers(".cls", b"4"),
        )
    finally:
        decoders["cls"] = before
        del decoders["xyz"]


def check_the_list_of_image_extensions(wds, folder):
    autodecode = module(wds, "autodecode")
    sample = {"__key__": "a", "pic": media_bytes(folder)}
    unknown = type(wds.Decoder([wds.imagehandler("rgb8")])(dict(sample))["pic"]).__name__
    autodecode.IMAGE_EXTENSIONS.append("pic")
    try:
        handler = autodecode.ImageHandler("rgb8", autodecode.IMAGE_EXTENSIONS)
        return unknown, wds.Decoder([handler])(dict(sample))["pic"].shape
    finally:
        autodecode.IMAGE_EXTENSIONS.remove("pic")


def media_bytes(folder):
    with tarfile.open(f"{folder}/media.tar") as tar:
        return tar.extractfile("d/a.png").read()


def check_decoding_errors(wds, folder):
    decoder = wds.Decoder([])
    sample = {"__key__": "a", "__url__": "u", "cls": b"no number"}
    try:
        decoder(sample)
    except wds.DecodingError as error:
        made = wds.DecodingError("u", "a", "cls", {})
        return error.url, error.key, error.k, error.sample is sample, made.url, made.k
    return None


def check_basic_loads(wds, folder):
    autodecode, writer = module(wds, "autodecode"), module(wds, "writer")
    return (
        autodecode.npy_loads(writer.numpy_dumps(np.arange(3))).tolist(),
        autodecode.npz_loads(writer.numpy_npz_dumps({"a": np.ones(2)}))["a"].tolist(),
        autodecode.tenbin_loads(writer.tenbin_dumps([np.ones(2, "f")]))[0].tolist(),
        autodecode.msgpack_loads(writer.mp_dumps({"a": [1]})),
        autodecode.default_decoder({"__key__": "a", "txt": b"x"})["txt"],
        autodecode.call_extension_handler(".a.b", 1, str, ["b"]),
        autodecode.gzfilter(".txt.gz", gzip.compress(b"q")).data,
        autodecode.torch_loads(writer.torch_dumps({"a": 1})),
    )


def check_the_lock(wds, folder):
    utils, autodecode = module(wds, "utils"), module(wds, "autodecode")
    gopen = module(wds, "gopen")
    before = utils.enforce_security
    os.environ["GOPEN_REWRITE"] = "x=y"
    found = []
    try:
        utils.enforce_security = True
        for function, argument in (
            (autodecode.unpickle_loads, pickle.dumps(1)),
            (autodecode.torch_loads, b""),
            (gopen.gopen_pipe, "pipe:true"),
            (gopen.rewrite_url, "x"),
        ):
            try:
                function(argument)
            except ValueError as error:
                found.append(str(error).partition(";")[0].rstrip("."))
        del os.environ["GOPEN_REWRITE"]
        for url in (first(folder), "file:" + first(folder)):
            try:
                gopen.gopen(url)
            except ValueError as error:
                found.append(str(error).partition(";")[0])
    finally:
        utils.enforce_security = before
        os.environ.pop("GOPEN_REWRITE", None)
    return found


# Sources


def check_shard_lists(wds, folder):
    source = wds.SimpleShardList(shards(folder))
    names = [os.path.basename(each["url"]) for each in source]
    return len(source), names, isinstance(source.urls, list)


def check_shards_can_be_taken_out(wds, folder):
    source = wds.SimpleShardList(shards(folder))
    source.urls.pop()
    del source.urls[0]
    return [os.path.basename(each["url"]) for each in source]


def check_a_seed_of_shard_lists(wds, folder):
    source = wds.SimpleShardList(shards(folder), seed=4)
    return sorted(os.path.basename(each["url"]) for each in source)


def check_resampled_shards(wds, folder):
    source = wds.ResampledShards(shards(folder), nshards=30, deterministic=True)
    before = source.epoch
    one, other = list(source), list(source)
    again = list(wds.ResampledShards(shards(folder), nshards=30, deterministic=True))
    fields = source.nshards, source.seed, source.deterministic, callable(source.worker_seed)
    return before, source.epoch, len(one), one != other, one == again, fields, len(source.urls)


def check_no_shards(wds, folder):
    return raised(wds.ResampledShards, [])


def check_splitters(wds, folder):
    os.environ.update(RANK="1", WORLD_SIZE="2", WORKER="1", NUM_WORKERS="3")
    try:
        numbers = list(range(12))
        return (
            list(wds.split_by_node(numbers)),
            list(wds.split_by_worker(numbers)),
            raised(list, wds.single_node_only(numbers)),
            wds.utils.pytorch_worker_info(),
        )
    finally:
        for name in ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS"):
            del os.environ[name]


def check_non_empty(wds, folder):
    return list(wds.non_empty([1])), raised(list, wds.non_empty([]))


def check_resampled_stage(wds, folder):
    return len(list(wds.resampled(9)([1, 2, 3])))


def check_expansions(wds, folder):
    shardlists = module(wds, "shardlists")
    os.environ["WDS_NAME"] = "x"
    return (
        shardlists.expand_urls("a-{0..2}.tar::b.tar"),
        shardlists.expand_source(["a", "b"]),
        shardlists.envsubst("${NAME}-1"),
        shardlists.expand("$WDS_NAME/y"),
        shardlists.without_last_extension("a.b.c"),
        shardlists.get_pid_from_filename("x.tar._12_"),
        shardlists.get_pid_from_filename("x.tar"),
        shardlists.check_pid_is_running(os.getpid()),
    )


def check_a_folder_that_others_fill(wds, folder):
    directory = Path(folder) / "hot"
    directory.mkdir(exist_ok=True)
    for number in range(2):
        write_tar(directory / f"{number}.tar", [(f"{number}.txt", b"x")])
    DirectoryShardList = module(wds, "shardlists").DirectoryShardList
    source = DirectoryShardList(f"{directory}/", pattern="*.tar", poll=None, mode="keep")
    claimed = []
    for each in source:
        name = os.path.basename(each["url"])
        claimed.append((sorted(each), name.replace(str(os.getpid()), "PID")))
    left = sorted(path.name for path in directory.iterdir())
    for path in directory.iterdir():
        path.unlink()
    return sorted(claimed), left


def check_recycling(wds, folder):
    directory = Path(folder) / "recycled"
    directory.mkdir(exist_ok=True)
    DirectoryShardList = module(wds, "shardlists").DirectoryShardList
    found = []
    for mode in ("resample", "keep", "unlink"):
        path = directory / "a.tar._99_"
        path.write_bytes(b"")
        DirectoryShardList(f"{directory}/", mode=mode).recycle(str(path))
        found.append(sorted(each.name for each in directory.iterdir()))
        for each in directory.iterdir():
            each.unlink()
    return found


def check_mixes(wds, folder):
    one, two = [1, 2, 3], [10]
    robin, mixed = wds.RoundRobin([one, two]), wds.RandomMix([one, two], [1, 2], longest=True)
    return (
        list(robin),
        list(wds.RoundRobin([one, two], longest=True)),
        sorted(mixed),
        mixed.probs,
        mixed.longest,
        mixed.datasets,
        robin.longest,
        len(robin.datasets),
    )


def check_mix_functions(wds, folder):
    mix = module(wds, "mix")
    return (
        list(mix.round_robin_shortest(iter([1, 2]), iter([3]))),
        list(mix.round_robin_longest(iter([1, 2]), iter([3]))),
        sorted(mix.random_samples([iter([1, 2]), iter([3])], longest=True)),
    )


def check_reading_by_steps(wds, folder):
    tariterators = module(wds, "tariterators")
    streams = tariterators.url_opener(iter([{"url": first(folder)}]))
    files = list(tariterators.tar_file_expander(streams))
    samples = list(tariterators.group_by_keys(iter(files)))
    return len(files), files[-1], sorted(files[0]), keys(samples), sorted(samples[0])


def check_grouping(wds, folder):
    group = module(wds, "tariterators").group_by_keys
    members = [
        {"fname": name, "data": b"", "__url__": "u"} for name in ("a.TXT", "a.cls", "b.txt", "c")
    ]
    twice = [{"fname": "a.txt", "data": b"", "__url__": "u"}] * 2
    return (
        list(group(iter(members))),
        next(iter(group(iter(members), lcase=False))),
        list(group(iter(members), suffixes={"cls"})),
        raised(list, group(iter(twice))),
        list(group(iter([members[0], {}, members[0]]))),
    )


def check_grouping_files_of_one_name(wds, folder):
    path = Path(folder) / "same.tar"
    write_tar(path, [("a.txt", b"1"), ("a.txt", b"2"), ("b.txt", b"3")])
    tariterators = module(wds, "tariterators")
    with open(path, "rb") as file:
        files = list(tariterators.tar_file_iterator(file))
    found = [(each["fname"], each["data"]) for each in files]
    members = ({**each, "__url__": "u"} for each in files)
    grouped = tariterators.group_by_keys(members, handler=wds.ignore_and_continue)
    return found, [sample["txt"] for sample in grouped]


def check_shardlist(wds, folder):
    return list(module(wds, "tariterators").shardlist("a-{0..1}.tar"))


def check_keys_of_names(wds, folder):
    split = module(wds, "tariterators").base_plus_ext
    return [split(name) for name in ("a.b", "a.b.c", "d.e/a.b", "a", "d/.b", ".b")]


# Caches and openers


def check_names_in_caches(wds, folder):
    name = module(wds, "cache").url_to_cache_name
    urls = ["http://h/a/b/c.tar?x=1", "s3://b/k.tar", "/d/e.tar", "pipe:cat x", "hf://a/b"]
    return [name(url) for url in urls], name(urls[0], 1), raised(name, 3) is not None


def check_streaming_open(wds, folder):
    opener = module(wds, "cache").StreamingOpen()
    (found,) = opener(iter([{"url": first(folder)}]))
    with found["stream"] as stream:
        return found["local_path"] == first(folder), len(stream.read(100))


def check_file_cache_of_local_files(wds, folder):
    cache = module(wds, "cache").FileCache(f"{folder}/cache", verbose=False)
    return cache.get_file(first(folder)) == first(folder), cache.cleaner, cache.cache_dir[-5:]


def check_cleaning_a_folder(wds, folder):
    directory = Path(folder) / "full"
    directory.mkdir(exist_ok=True)
    for name, size in (("a", 10), ("b", 20), ("c", 30)):
        (directory / name).write_bytes(b"x" * size)
    cleanup = wds.LRUCleanup(str(directory), cache_size=50, keyfn=os.path.basename, interval=None)
    cleanup.cleanup()
    first_left = sorted(path.name for path in directory.iterdir())
    cleanup.cache_size = 30
    cleanup.set_cache_dir(str(directory))
    cleanup.cleanup()
    return first_left, sorted(path.name for path in directory.iterdir())


def check_file_types(wds, folder):
    cache = module(wds, "cache")
    path = Path(folder) / "no.tar"
    path.write_bytes(b"nothing")
    return (
        cache.check_tar_format(first(folder)),
        cache.check_tar_format(str(path)),
        "tar archive" in cache.magic_filetype(first(folder)),
        cache.islocal("/a/b"),
        cache.islocal("http://x"),
    )


def check_download(wds, folder):
    target = f"{folder}/copied.tar"
    module(wds, "cache").download(first(folder), target)
    return Path(target).read_bytes() == Path(first(folder)).read_bytes()


def check_gopen_of_files(wds, folder):
    path = f"{folder}/written"
    with wds.gopen(path, "wb") as stream:
        stream.write(b"a\nb\n")
    with wds.gopen(path) as stream:
        line = stream.readline()
    with wds.gopen(f"file:{path}") as stream:
        return line, stream.read(), isinstance(stream, io.BufferedReader)


def check_own_openers(wds, folder):
    schemes = wds.gopen_schemes
    schemes["mine"] = lambda url, *args, **kw: io.BytesIO(Path(first(folder)).read_bytes())
    default = schemes["__default__"]
    schemes["__default__"] = lambda url, *args, **kw: io.BytesIO(url.encode())
    try:
        return (
            keys(wds.WebDataset("mine://x.tar", shardshuffle=False)),
            wds.gopen("megfile://x").read(),
        )
    finally:
        del schemes["mine"]
        schemes["__default__"] = default


def check_an_unknown_scheme(wds, folder):
    return raised(wds.gopen, "nobody://x")


def check_pipes(wds, folder):
    Pipe = module(wds, "gopen").Pipe
    with Pipe("echo hello", mode="rb", shell=True) as stream:
        text = stream.read()
    listed = Pipe(["echo", "a b"], mode="rb")
    found = listed.read()
    listed.close()

    def fails():
        with Pipe("exit 3", mode="rb", shell=True) as stream:
            stream.read()
            stream.wait_for_child()

    tolerant = Pipe("exit 3", mode="rb", shell=True, ignore_status=[3])
    tolerant.read()
    tolerant.close()
    return text, found, raised(fails), tolerant.status


def check_rewriting(wds, folder):
    os.environ["GOPEN_REWRITE"] = "gs://a=/b;http:=https:"
    try:
        rewrite = module(wds, "gopen").rewrite_url
        return [rewrite(url) for url in ("gs://a/x", "http://y", "z")]
    finally:
        del os.environ["GOPEN_REWRITE"]


# Writing


def written(wds, folder, samples, **kw):
    path = f"{folder}/out.tar"
    with wds.TarWriter(path, **kw) as sink:
        sizes = [sink.write(sample) for sample in samples]
    with tarfile.open(path) as tar:
        found = [(member.name, tar.extractfile(member).read()) for member in tar]
    return sizes, found


def check_a_tar_writer(wds, folder):
    sample = {"__key__": "a/b", "txt": "hello", "cls": 7, "json": [1, None], "__meta__": "x"}
    return written(wds, folder, [sample])


def check_a_tar_writer_of_bytes(wds, folder):
    sample = {"__key__": "a", "x": b"1"}
    wrong = {"__key__": "a", "x": 1}
    return (
        written(wds, folder, [sample], encoder=False),
        raised(written, wds, folder, [wrong], encoder=False),
        raised(written, wds, folder, [{"txt": "no key"}]),
    )


def check_own_encoders(wds, folder):
    table = {"n": lambda value: str(value).encode()}
    whole = lambda sample: {**sample, "n": b"whole"}  # noqa: E731
    sample = {"__key__": "a", "n": 5}
    return (
        written(wds, folder, [sample], encoder=table),
        written(wds, folder, [sample], encoder=whole),
    )


def check_unknown_fields_are_not_written(wds, folder):
    return raised(written, wds, folder, [{"__key__": "a", "unknown": object()}])


def check_attributes_of_members(wds, folder):
    path = f"{folder}/attributes.tar"
    with wds.TarWriter(path, user="u", group="g", mode=0o600, mtime=5) as sink:
        sink.write({"__key__": "a", "txt": "x"})
        fields = sink.user, sink.group, sink.mode, sink.mtime, sink.keep_meta
    with tarfile.open(path) as tar:
        (member,) = tar
    return fields, member.uname, member.gname, member.mode, member.mtime


def check_tar_modes(wds, folder):
    mode = wds.TarWriter.tarmode
    return [
        mode("a.tar"),
        mode("a.tar.gz"),
        mode("a.tgz", None),
        mode("a", True),
        mode("a.gz", False),
    ]


def check_compressed_writing(wds, folder):
    path = f"{folder}/out.tar.gz"
    with wds.TarWriter(path) as sink:
        sink.write({"__key__": "a", "txt": "x"})
    return keys(wds.WebDataset(path, shardshuffle=False)), Path(path).read_bytes()[:2]


def check_writing_to_a_stream(wds, folder):
    stream = io.BytesIO()
    sink = wds.TarWriter(stream)
    sink.write({"__key__": "a", "txt": "x"})
    sink.close()
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as tar:
        return tar.getnames()


def check_a_shard_writer(wds, folder):
    done = []
    pattern = f"{folder}/written-%03d.tar"
    with wds.ShardWriter(pattern, maxcount=3, post=done.append, verbose=0) as sink:
        for number in range(7):
            sink.write({"__key__": f"{number}", "txt": f"{number}"})
        fields = sink.verbose, callable(sink.post), sink.opener, sink.maxcount
    names = [os.path.basename(name) for name in done]
    return names, fields, keys(wds.WebDataset(done, shardshuffle=False)), sink.total


def check_shards_begin_at_a_number(wds, folder):
    pattern = f"{folder}/later-%d.tar"
    with wds.ShardWriter(pattern, start_shard=7, verbose=0) as sink:
        sink.write({"__key__": "a", "txt": "x"})
        name = os.path.basename(sink.fname)
    return name


def check_own_opener_of_a_shard_writer(wds, folder):
    opened = []

    def opener(name):
        opened.append(os.path.basename(name))
        return open(name, "wb")

    with wds.ShardWriter(f"{folder}/opened-%d.tar", opener=opener, verbose=0) as sink:
        sink.write({"__key__": "a", "txt": "x"})
    return opened


def check_encoding_functions(wds, folder):
    writer = module(wds, "writer")
    handlers = writer.make_handlers()
    writer.add_handlers(handlers, "up loud", lambda text: text[0].upper().encode())
    encode = writer.make_encoder(True)
    return (
        writer.encode_based_on_extension({"__key__": "a", "loud": ["x"], "cls": 3}, handlers),
        writer.encode_based_on_extension1({"a": 1}, "json", handlers),
        writer.encode_based_on_extension1(b"raw", "bin", handlers),
        gzip.decompress(writer.encode_based_on_extension1("t", "txt.gz", handlers)),
        encode({"__key__": "k", "cls": 1}),
        writer.make_encoder(False)({"a": b"1"}),
        writer.bytestr(5),
        writer.bytestr(b"x"),
        raised(writer.encode_based_on_extension1, object(), "zzz", handlers),
        raised(writer.make_encoder, "what"),
    )


def check_the_registry_of_encoders(wds, folder):
    handlers = module(wds, "writer").default_handlers
    handlers["mine"] = lambda value: f"<{value}>".encode()
    try:
        return written(wds, folder, [{"__key__": "a", "mine": 5}])
    finally:
        del handlers["mine"]


def check_images_are_written(wds, folder):
    writer = module(wds, "writer")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    png = writer.imageencoder(pixels, "PNG")
    from PIL import Image

    return (
        np.asarray(Image.open(io.BytesIO(png))).tolist() == pixels.tolist(),
        raised(writer.imageencoder, np.full((2, 2, 3), 2.0, "f")),
    )


def check_tenbin(wds, folder):
    tenbin = module(wds, "tenbin")
    arrays = [np.arange(3, dtype="f4"), np.ones((2, 2), "i8")]
    data = tenbin.encode_buffer(arrays)
    shape, dtype, info = tenbin.decode_header(bytes(tenbin.encode_header(arrays[1], "x")))
    stream = io.BytesIO()
    tenbin.write(stream, arrays)
    chunk = io.BytesIO()
    tenbin.write_chunk(chunk, b"abc")
    chunk.seek(0)
    tenbin.save(f"{folder}/x.ten", *arrays)
    return (
        len(data),
        bytes(data[:8]),
        [array.tolist() for array in tenbin.decode_buffer(bytes(data))],
        bytes(data) == stream.getvalue(),
        tuple(map(int, shape)),
        str(dtype),
        info,
        bytes(tenbin.read_chunk(chunk)),
        tenbin.unstr64(tenbin.str64("abc")),
        tenbin.roundup(65),
        tenbin.bytelen(b"abc"),
        len(tenbin.decode_chunks(bytes(data))),
        len(tenbin.encode_list(arrays)),
        [array.tolist() for array in tenbin.load(f"{folder}/x.ten")],
        raised(tenbin.save, f"{folder}/x.bin"),
        tenbin.short_to_long["f4"],
        tenbin.magic_str,
    )


# Helpers


def check_utils(wds, folder):
    utils = module(wds, "utils")
    batches = [([1, 2],), ([3],)]
    return (
        list(utils.repeatedly(batches, nbatches=3)),
        list(utils.repeatedly(batches, nepochs=2)) == batches * 2,
        list(utils.repeatedly0([1, 2], 2, 1)),
        utils.guess_batchsize(([1, 2],)),
        utils.identity(5),
        utils.safe_eval("5", "{}+1"),
        raised(utils.safe_eval, "a b"),
        utils.lookup_sym("dumps", ["os", "json"]) is json.dumps,
        [utils.is_iterable(each) for each in ("a", b"a", [1], iter([1]), 5)],
        utils.fnmatch_with_braces("a.jpg", "*.{png,jpg}"),
        [os.path.basename(p) for p in utils.glob_with_braces(f"{folder}/shard-00000{{0,1}}.tar")],
        utils.compute_sample_weights([(10, 1), (5, 4)]).tolist(),
        utils.pytorch_worker_info(),
        isinstance(utils.make_seed(1, 2), int),
    )


def check_deprecations(wds, folder):
    import warnings

    utils = module(wds, "utils")

    @utils.deprecated
    def old():
        return 1

    @utils.obsolete(reason="gone")
    def gone():
        return 2

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = old()
    try:
        gone()
        refused = False
    except utils.ObsoleteException as error:
        refused = "gone" in str(error)
    os.environ["ALLOW_OBSOLETE"] = "1"
    try:
        return value, [each.category.__name__ for each in caught], refused, gone()
    finally:
        del os.environ["ALLOW_OBSOLETE"]


def check_handlers(wds, folder):
    import warnings

    error = ValueError("x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (
            wds.ignore_and_continue(error),
            wds.ignore_and_stop(error),
            wds.warn_and_continue(error),
            wds.warn_and_stop(error),
            raised(wds.reraise_exception, error),
        )


def check_extra_datasets(wds, folder):
    return len(list(wds.MockDataset({"a": 1}, 4))), wds.MockDataset(1, 2).length


def check_loaders(wds, folder):
    dataset = plain(wds, folder).decode().to_tuple("txt", "cls").batched(5)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=0)
    rebatched = loader.unbatched().shuffle(10).batched(10)
    return len(list(loader)), [len(texts) for texts, _ in rebatched]


def check_loader_lengths(wds, folder):
    dataset = plain(wds, folder).decode().to_tuple("cls").batched(4)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=0)
    loader = loader.with_length(5, silent=True).with_epoch(7)
    return len(loader), len(list(loader))


def check_default_collation(wds, folder):
    dataset = plain(wds, folder).decode().to_tuple("txt", "cls")
    loader = wds.WebLoader(dataset, batch_size=4, num_workers=0)
    texts, labels = next(iter(loader))
    return list(texts), labels.tolist(), type(labels).__name__


def check_torch_loader_with_workers(wds, folder):
    from torch.utils.data import DataLoader

    dataset = plain(wds, folder).map(lambda sample: sample["__key__"])
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    return sorted(loader)


def check_fluid_wrapper(wds, folder):
    dataset = wds.FluidWrapper(wds.MockDataset({"a": 2}, 5))
    return list(dataset.map(lambda sample: sample["a"]).batched(2, None))


# Corners


def check_attributes_of_a_new_pipeline(wds, folder):
    dataset = wds.DataPipeline(len, verbose=True)
    return dataset.length, dataset.repetitions, dataset.nsamples, dataset.pipeline == [len]


def check_passes_one_by_one(wds, folder):
    dataset = plain(wds, folder).with_epoch(3)
    return keys(dataset.iterator1())[:4], len(list(islice(dataset.iterator(), 50)))


def check_invoking_stages(wds, folder):
    dataset = plain(wds, folder)
    return list(dataset.invoke(wds.slice(2), iter([1, 2, 3]))), list(dataset.invoke([4, 5]))


def check_nsamples_set_by_hand(wds, folder):
    dataset = plain(wds, folder)
    dataset.repetitions, dataset.nsamples = 3, 44
    return len(list(dataset))


def check_a_subclass_with_a_length(wds, folder):
    class Sized(wds.DataPipeline):
        def __init__(self, *stages, length):
            super().__init__(*stages)
            self.length = length

        def __len__(self):
            return self.length

    dataset = Sized(wds.SimpleShardList(shards(folder)), wds.tarfile_to_samples(), length=9)
    return len(dataset), len(list(dataset))


def check_a_subclass_of_webdataset(wds, folder):
    class Pairs(wds.WebDataset):
        def __init__(self, urls, **kw):
            super().__init__(urls, shardshuffle=False, **kw)
            self.pipeline.append(wds.decode())
            self.pipeline.append(wds.to_tuple("txt", "cls"))

    dataset = Pairs(shards(folder))
    return next(iter(dataset)), type(dataset.slice(1)).__name__


def check_the_first_stage_is_the_list_of_shards(wds, folder):
    dataset = plain(wds, folder)
    source = dataset.pipeline[0]
    return isinstance(source, wds.SimpleShardList), len(source.urls), dataset.stage(0) is source


def check_shards_that_cannot_be_dispatched(wds, folder):
    return raised(wds.WebDataset, 5, shardshuffle=False)


def check_no_node_splitter(wds, folder):
    dataset = plain(wds, folder, nodesplitter=None, workersplitter=None)
    return len(list(dataset))


def check_own_splitters(wds, folder):
    def second(source):
        yield from islice(source, 1, None, 2)

    return keys(plain(wds, folder, nodesplitter=second))


def check_shards_of_many_workers(wds, folder):
    from torch.utils.data import DataLoader

    dataset = plain(wds, folder).decode().to_tuple("__key__", "cls").batched(3)
    loader = DataLoader(dataset, batch_size=None, num_workers=4, multiprocessing_context="fork")
    return sorted(key for found, _ in loader for key in found)


def check_a_handler_is_asked_for_each_sample(wds, folder):
    asked = []

    def handler(error):
        asked.append(type(error).__name__)
        return True

    def broken(key, data):
        if key.endswith(".cls"):
            raise RuntimeError("broken")

    found = list(plain(wds, folder).decode(broken, handler=handler))
    return len(found), len(asked), set(asked) == {"DecodingError"}


def check_handlers_of_to_tuple_and_rename(wds, folder):
    dataset = plain(wds, folder)
    handler = wds.ignore_and_continue
    return (
        list(dataset.to_tuple("png", handler=handler)),
        list(dataset.rename(handler=handler, image="png")),
        list(dataset.map_dict(handler=handler, png=len)),
        list(dataset.to_tuple("txt").map_tuple(int, handler=handler)),
    )


def check_none_from_fields(wds, folder):
    dataset = wds.DataPipeline(lambda: iter([{"a": None, "b": 1}, {"a": 2, "b": 3}]))
    strict = dataset.compose(wds.to_tuple("a", "b"))
    lax = dataset.compose(wds.to_tuple("a", "b", missing_is_error=False))
    return raised(list, strict), list(lax)


def check_keys_of_mapped_samples(wds, folder):
    dataset = plain(wds, folder).map(lambda sample: {"__key__": "other", "x": 1})
    return next(iter(dataset))["__key__"]


def check_shuffle_of_nothing(wds, folder):
    dataset = plain(wds, folder)
    return dataset.shuffle(0) is dataset, list(wds.shuffle(10)(iter([])))


def check_shuffle_is_a_shuffle(wds, folder):
    numbers = list(range(200))
    found = list(wds.shuffle(50, initial=50)(iter(numbers)))
    return found != numbers, sorted(found) == numbers


def check_seeds_of_shuffle(wds, folder):
    one = list(wds.shuffle(50, seed=3)(iter(range(100))))
    other = list(wds.shuffle(50, seed=3)(iter(range(100))))
    return one == other


def check_nested_pipelines(wds, folder):
    inner = plain(wds, folder).map(lambda sample: sample["__key__"])
    outer = wds.DataPipeline(inner, wds.batched(7, None))
    limited = wds.DataPipeline(plain(wds, folder).with_epoch(6), wds.map(lambda s: 1))
    return [len(batch) for batch in outer], len(list(limited))


def check_a_mixture_of_epochs(wds, folder):
    one = plain(wds, folder).map(lambda s: "one").with_epoch(4)
    two = plain(wds, folder).map(lambda s: "two").with_epoch(2)
    return list(wds.RoundRobin([one, two], longest=True)), len(list(wds.RoundRobin([one, two])))


def check_a_torch_loader_as_source(wds, folder):
    from torch.utils.data import DataLoader

    dataset = plain(wds, folder).map(lambda sample: sample["__key__"])
    loader = DataLoader(dataset, batch_size=None, num_workers=0)
    return list(wds.FluidWrapper(loader).slice(3)), len(list(wds.DataPipeline(loader)))


def check_batches_of_arrays(wds, folder):
    import torch

    samples = [(np.ones(2) * n, torch.ones(3) * n, n / 2, "x", b"y") for n in range(3)]
    dataset = wds.DataPipeline(lambda: iter(samples), wds.batched(3))
    arrays, tensors, floats, texts, data = next(iter(dataset))
    return arrays.shape, tuple(tensors.shape), floats.tolist(), texts, data


def check_batches_that_do_not_fit(wds, folder):
    arrays = wds.DataPipeline(lambda: iter([(np.ones(2),), (np.ones(3),)]), wds.batched(2))
    dicts = wds.DataPipeline(lambda: iter([{"a": 1}, {"b": 1}]), wds.batched(2))
    return raised(list, arrays) is not None, raised(list, dicts) is not None


def check_collation_options(wds, folder):
    collate = module(wds, "filters").default_collation_fn
    samples = [(1, np.ones(2)), (2, np.ones(2))]
    numbers, arrays = collate(samples, combine_scalars=False, combine_tensors=False)
    return list(numbers), [array.tolist() for array in arrays]


def check_unlisted_of_batches(wds, folder):
    stage = module(wds, "filters").unlisted()
    return list(wds.DataPipeline(lambda: iter([[1, 2], [3]]), stage))


def check_fields_in_capitals(wds, folder):
    path = f"{folder}/capitals.tar"
    write_tar(path, [("A.TXT", b"x"), ("A.Cls", b"1")])
    (sample,) = wds.WebDataset(path, shardshuffle=False).decode()
    return sample["__key__"], sample["txt"], sample["cls"]


def check_names_with_dots_and_folders(wds, folder):
    path = f"{folder}/names.tar"
    write_tar(path, [("a.b/c.d.txt", b"x"), ("./e.txt", b"y"), ("noext", b"z")])
    return [(s["__key__"], sorted(s)) for s in wds.WebDataset(path, shardshuffle=False)]


def check_long_names(wds, folder):
    path = f"{folder}/long.tar"
    name = "d" * 90 + "/" + "n" * 120
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo(name + ".txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    return keys(wds.WebDataset(path, shardshuffle=False)) == [name]


def check_json_of_several_kinds(wds, folder):
    sample = {"__key__": "a", "json": b"[1, 2.5, {}]", "jsn": b'"x"', "a.b.json": b"true"}
    return wds.Decoder([])(sample)


def check_numbers_of_several_kinds(wds, folder):
    sample = {"__key__": "a", "cls": b" 7\n", "cls2": b"8", "index": b"-3", "inx": b"1", "id": b"9"}
    return wds.Decoder([])(sample)


def check_npz_and_msgpack_and_tenbin(wds, folder):
    writer = module(wds, "writer")
    sample = {
        "__key__": "a",
        "npz": writer.numpy_npz_dumps({"x": np.arange(3)}),
        "mp": writer.mp_dumps({"k": 1}),
        "ten": bytes(writer.tenbin_dumps(np.ones(2, "f4"))),
        "pth": writer.torch_dumps({"w": 2}),
    }
    found = wds.Decoder([])(sample)
    return found["npz"]["x"].tolist(), found["mp"], found["ten"][0].tolist(), found["pth"]


def check_a_round_trip(wds, folder):
    sample = {
        "__key__": "sample",
        "txt": "text",
        "cls": 4,
        "json": {"a": [1]},
        "npy": np.arange(4),
        "png": np.zeros((3, 3, 3), np.uint8),
        "mp": {"b": 2},
    }
    path = f"{folder}/round.tar"
    with wds.TarWriter(path) as sink:
        sink.write(sample)
    (found,) = wds.WebDataset(path, shardshuffle=False).decode("rgb8")
    return (
        found["txt"],
        found["cls"],
        found["json"],
        found["npy"].tolist(),
        found["png"].shape,
        found["mp"],
    )


def check_renaming_of_handlers(wds, folder):
    names = ["reraise_exception", "ignore_and_continue", "warn_and_stop"]
    handlers = module(wds, "handlers")
    return [getattr(wds, name) is getattr(handlers, name) for name in names]


def check_versions(wds, folder):
    return wds.__version__.split(".")[0]


def check_gopen_modes(wds, folder):
    return raised(wds.gopen, first(folder), "r+") is not None, raised(wds.gopen, f"{folder}/no/x")


def check_set_options(wds, folder):
    gopen = module(wds, "gopen")
    with wds.gopen(first(folder)) as stream:
        plain_file = gopen.set_options(stream, timeout=1)
    pipe = gopen.Pipe("true", mode="rb", shell=True)
    found = gopen.set_options(pipe, timeout=1.0, ignore_errors=True, ignore_status=[0, 2])
    fields = pipe.timeout, pipe.ignore_errors
    pipe.close()
    return plain_file, found, fields


def check_reader(wds, folder):
    stream = module(wds, "gopen").reader(first(folder))
    with stream:
        return len(stream.read(7))


def check_extra_epochs(wds, folder):
    extra = module(wds, "extradatasets")
    sized = extra.MockDataset({"a": 1}, 3)
    return sized.sample, sized.length, len(list(sized))


def check_local_paths(wds, folder):
    sample = next(iter(plain(wds, folder)))
    return sample["__local_path__"] == first(folder)


def check_keep_meta(wds, folder):
    sample = {"__key__": "a", "_note": "kept", "txt": "x"}
    return written(wds, folder, [sample], keep_meta=True)


def check_writing_after_reading(wds, folder):
    path = f"{folder}/copied-samples.tar"
    with wds.TarWriter(path) as sink:
        for sample in plain(wds, folder):
            sink.write(sample)
    one = [(s["__key__"], s["txt"]) for s in wds.WebDataset(path, shardshuffle=False)]
    return one == [(s["__key__"], s["txt"]) for s in plain(wds, folder)]


# Commands and servers


def allowing(function, *args, **kw):
    """Call a function where commands and pickles are allowed, if that is asked for at all."""
    os.environ["ENERGON_ALLOW"] = "shell,pickle"
    try:
        return function(*args, **kw)
    finally:
        del os.environ["ENERGON_ALLOW"]


def check_commands_as_shards(wds, folder):
    def run():
        whole = wds.WebDataset(f"pipe:cat {first(folder)}", shardshuffle=False)
        cut = f"pipe:head -c 5000 {first(folder)}"
        stops = wds.WebDataset(cut, shardshuffle=False, handler=wds.ignore_and_stop)
        return (
            keys(whole),
            raised(list, wds.WebDataset(cut, shardshuffle=False)),
            len(list(stops)) < 5,
        )

    return allowing(run)


def check_commands_to_write_to(wds, folder):
    def run():
        with wds.gopen(f"pipe:cat > {folder}/piped", "wb") as stream:
            stream.write(b"abc")
        with wds.TarWriter(f"pipe:cat > {folder}/piped.tar") as sink:
            sink.write({"__key__": "a", "txt": "x"})
        found = keys(wds.WebDataset(f"{folder}/piped.tar", shardshuffle=False))
        return Path(f"{folder}/piped").read_bytes(), found

    return allowing(run)


def check_failing_commands(wds, folder):
    def run():
        return raised(list, wds.WebDataset("pipe:exit 3", shardshuffle=False)) is not None

    return allowing(run)


def check_pickles(wds, folder):
    def run():
        dataset = wds.WebDataset(f"{folder}/media.tar", shardshuffle=False).decode()
        sample = next(iter(dataset))
        decode_pickle = module(wds, "filters").decode_pickle
        return (
            sample["pyd"],
            module(wds, "autodecode").unpickle_loads(pickle.dumps({"a": 1})),
            decode_pickle(io.BytesIO(pickle.dumps(5))),
        )

    return allowing(run)


def check_the_switch_of_the_program(wds, folder):
    utils = module(wds, "utils")
    before = utils.enforce_security
    utils.enforce_security = False
    try:
        dataset = wds.WebDataset(f"{folder}/media.tar", shardshuffle=False).decode()
        return next(iter(dataset))["pyd"], wds.gopen("pipe:echo x").read()
    finally:
        utils.enforce_security = before


class Server:
    """A web server of a folder, for as long as a `with` block."""

    def __init__(self, folder):
        import functools
        import http.server

        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *args):
                pass

        handler = functools.partial(Quiet, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self):
        import threading

        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def check_shards_of_a_server(wds, folder):
    with Server(folder) as url:
        return keys(wds.WebDataset(f"{url}/shard-00000{{0..1}}.tar", shardshuffle=False))


def check_a_cache_of_a_server(wds, folder):
    cache = Path(folder) / "served"
    cache.mkdir(exist_ok=True)
    with Server(folder) as url:
        urls = f"{url}/shard-00000{{0..1}}.tar"
        dataset = wds.WebDataset(urls, shardshuffle=False, cache_dir=str(cache))
        one = keys(dataset)
        return one, keys(dataset) == one, "__local_path__" in next(iter(dataset))


def check_files_of_a_cache(wds, folder):
    cache = module(wds, "cache")
    made = cache.FileCache(
        f"{folder}/named",
        url_to_name=cache.url_to_cache_name,
        validator=cache.check_tar_format,
        cache_size=10**9,
    )
    with Server(folder) as url:
        path = made.get_file(f"{url}/shard-000000.tar")
        refused = raised(made.get_file, f"{url}/no.tar")
        (opened,) = made(iter([{"url": f"{url}/shard-000000.tar"}]))
        size = len(opened["stream"].read())
    return os.path.relpath(path, folder), refused is not None, size, type(made.cleaner).__name__


def check_a_missing_object(wds, folder):
    with Server(folder) as url:
        dataset = wds.WebDataset(f"{url}/none.tar", shardshuffle=False)
        return raised(list, dataset) is not None
