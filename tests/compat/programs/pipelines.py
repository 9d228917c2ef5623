"""Put pipelines together, change them, and the corners of all that."""

from __future__ import annotations

import io
import pickle
import random
import tarfile
from itertools import islice

import numpy as np
from common import first, keys, module, plain, raised, shards, write_tar


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


def check_writing_after_reading(wds, folder):
    path = f"{folder}/copied-samples.tar"
    with wds.TarWriter(path) as sink:
        for sample in plain(wds, folder):
            sink.write(sample)
    one = [(s["__key__"], s["txt"]) for s in wds.WebDataset(path, shardshuffle=False)]
    return one == [(s["__key__"], s["txt"]) for s in plain(wds, folder)]
