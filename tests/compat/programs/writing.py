"""Write shards, and use the helpers."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
from common import keys, module, plain, raised


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


def check_keep_meta(wds, folder):
    sample = {"__key__": "a", "_note": "kept", "txt": "x"}
    return written(wds, folder, [sample], keep_meta=True)
