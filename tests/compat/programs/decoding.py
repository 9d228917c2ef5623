"""Decode fields."""

from __future__ import annotations

import gzip
import os
import pickle
import tarfile

import numpy as np
from common import first, module, plain, raised


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
