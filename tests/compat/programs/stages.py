"""Use each stage."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
from common import keys, module, plain, raised


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
