"""Programs as public projects have them, with several parts of the library in each."""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import first, keys, module, plain, shards, write_tar
from PIL import Image


def image_bytes(n, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), n, np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def captioned(folder, name="captioned", count=12):
    """Shards as img2dataset writes them, some samples without caption or with damaged images."""
    path = Path(folder) / name
    path.mkdir(exist_ok=True)
    for shard in range(3):
        members = []
        for n in range(shard * count // 3, (shard + 1) * count // 3):
            key = f"{shard:05}{n:04}"
            content = b"damaged" if n % 6 == 5 else image_bytes(n)
            members.append((f"{key}.png", content))
            if n % 6 != 4:
                members.append((f"{key}.txt", f"caption {n}".encode()))
            members.append((f"{key}.json", json.dumps({"width": 6 + n, "key": key}).encode()))
        write_tar(path / f"{shard:05}.tar", members)
    return str(path / "{00000..00002}.tar")


@contextmanager
def environment(**variables):
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_a_loader_as_open_clip_has_it(wds, folder):
    def has_caption(sample):
        return "txt" in sample and any(each in sample for each in ("png", "jpg"))

    def preprocess(image):
        return torch.from_numpy(np.asarray(image)).permute(2, 0, 1)[:, :2, :2]

    workers, batch_size, num_samples = 2, 2, 10
    handler = wds.ignore_and_continue
    dataset = wds.DataPipeline(
        wds.ResampledShards(captioned(folder)),
        wds.tarfile_to_samples(handler=handler),
        wds.shuffle(bufsize=20, initial=5),
        wds.select(has_caption),
        wds.decode("pilrgb", handler=handler),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
        wds.map_dict(image=preprocess, text=lambda text: text.split()[-1]),
        wds.to_tuple("image", "text"),
        wds.batched(batch_size, partial=False),
    )
    global_batches = math.ceil(num_samples / batch_size)
    worker_batches = math.ceil(global_batches / workers)
    dataset = dataset.with_epoch(worker_batches)
    loader = wds.WebLoader(
        dataset, batch_size=None, shuffle=False, num_workers=workers, persistent_workers=True
    )
    loader.num_batches, loader.num_samples = worker_batches * workers, num_samples
    found = [[(list(images.shape), len(texts)) for images, texts in loader] for _ in range(2)]
    return found, loader.num_batches, loader.num_samples


def check_a_dataset_as_lavis_has_it(wds, folder):
    handler = wds.warn_and_continue
    dataset = wds.DataPipeline(
        wds.SimpleShardList(captioned(folder)),
        wds.tarfile_to_samples(handler=handler),
        wds.shuffle(1000, handler=handler),
        wds.decode("pilrgb", handler=handler),
        wds.to_tuple("png", "json", "txt", handler=handler),
        wds.map_tuple(np.asarray, lambda about: about["width"], str.upper, handler=handler),
        wds.map(lambda sample: {"image": sample[0], "text": sample[2]}, handler=handler),
    )
    return sorted((sample["text"], list(sample["image"].shape)) for sample in dataset)


def check_pairs_as_diffusers_has_them(wds, folder):
    def filter_keys(names):
        def only(sample):
            return {name: value for name, value in sample.items() if name in names}

        return only

    pipeline = [
        wds.SimpleShardList(captioned(folder)),
        wds.shuffle(10),
        wds.split_by_worker,
        wds.tarfile_to_samples(handler=wds.ignore_and_continue),
        wds.select(lambda sample: json.loads(sample["json"])["width"] > 8),
        wds.decode("pil", handler=wds.ignore_and_continue),
        wds.rename(
            image="jpg;png;jpeg;webp", text="text;txt;caption", handler=wds.warn_and_continue
        ),
        wds.map(filter_keys({"image", "text"})),
        wds.map_dict(image=lambda image: torch.tensor(image.size)),
        wds.to_tuple("image", "text"),
    ]
    dataset = wds.DataPipeline(*pipeline, wds.batched(3, partial=True))
    loader = wds.WebLoader(dataset, batch_size=None, shuffle=False, num_workers=1)
    found = list(loader)
    return sorted(text for _, texts in found for text in texts), [list(i.shape) for i, _ in found]


def check_shards_as_img2dataset_writes_them(wds, folder):
    out = Path(folder) / "img2dataset"
    out.mkdir()
    done = []
    with wds.ShardWriter(str(out / "%05d.tar"), maxcount=4, start_shard=7, verbose=0) as sink:
        sink.verbose = 0
        for n in range(10):
            about = {"width": n, "sha256": "x" * n, "original": None}
            sink.write(
                {
                    "__key__": f"{n:09}",
                    "jpg": image_bytes(n, "JPEG"),
                    "txt": f"größe {n}",
                    "json": json.dumps(about, indent=4),
                }
            )
            done.append((Path(sink.fname).name, sink.count, sink.total, sink.shard))
    names = sorted(file.name for file in out.glob("*.tar"))
    dataset = wds.WebDataset([str(out / name) for name in names], shardshuffle=False).decode("rgb8")
    found = [(s["txt"], s["json"]["width"], s["jpg"].shape, s["jpg"].dtype.name) for s in dataset]
    return done, names, [[text, width, list(shape), kind] for text, width, shape, kind in found]


def check_resharding_as_datacomp_does_it(wds, folder):
    tariterators = module(wds, "tariterators")
    kept = {"0001", "0007", "0013", "0014"}
    target = Path(folder) / "resharded.tar"
    with wds.TarWriter(str(target)) as sink:
        urls = ({"url": url} for url in wds.SimpleShardList(shards(folder)).urls)
        streams = tariterators.url_opener(urls, handler=wds.reraise_exception)
        files = tariterators.tar_file_expander(streams, handler=wds.reraise_exception)
        for sample in tariterators.group_by_keys(files):
            if sample["__key__"] in kept:
                sink.write({k: v for k, v in sample.items() if not k.startswith("__url")})
    with tarfile.open(target) as tar:
        return [(member.name, member.size) for member in tar]


def check_interleaved_documents_as_open_flamingo_has_them(wds, folder):
    path = Path(folder) / "documents.tar"
    members = []
    for n in range(4):
        images = [{"image_name": f"{i}", "matched_text_index": i} for i in range(n)]
        document = {"text_list": [f"sentence {i}" for i in range(n + 1)], "image_info": images}
        members.append((f"{n:03}.json", json.dumps(document).encode()))
    write_tar(path, members)

    def preprocess(sample, min_images):
        document = json.loads(sample[0])
        if len(document["image_info"]) < min_images:
            raise ValueError("too few images")
        return " ".join(document["text_list"]), len(document["image_info"])

    def stopped(error):
        skipped.append(type(error).__name__)
        return True

    skipped = []
    dataset = wds.DataPipeline(
        wds.SimpleShardList(str(path)),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(handler=stopped),
        wds.to_tuple("json", handler=stopped),
        wds.map(partial(preprocess, min_images=2), handler=stopped),
        wds.batched(2, partial=False),
    )
    found = [(texts, np.asarray(counts).tolist()) for texts, counts in dataset]
    return found, skipped


def check_a_stage_of_an_augmenting_program(wds, folder):
    """One sample becomes several crops, with keys of their own."""

    def crops(source, number):
        for sample in source:
            for n in range(number):
                yield {
                    **sample,
                    "__key__": f"{sample['__key__']}-{n}",
                    "crop": sample["json"]["n"] * n,
                }

    dataset = plain(wds, folder).decode().compose(partial(crops, number=3)).slice(2, 11, 2)
    return [(sample["__key__"], sample["crop"]) for sample in dataset]


def check_filters_and_associations(wds, folder):
    labels = {f"{n:04}": {"label": n * n} for n in range(20)}
    dataset = (
        plain(wds, folder)
        .decode()
        .select(lambda sample: sample["cls"] != 1)
        .rename(about="json", keep=True)
        .map_dict(about=lambda about: about["n"] * 2)
        .compose(wds.associate(labels))
    )
    return [(sample["about"], sample["label"], sorted(sample)) for sample in dataset][:5]


def check_a_handler_that_counts(wds, folder):
    counts = Counter()

    def handler(error):
        counts[type(error).__name__] += 1
        return counts["ValueError"] < 3

    def picky(sample):
        if sample["cls"] == 1:
            raise ValueError(sample["__key__"])
        return sample

    dataset = (
        plain(wds, folder, handler=handler).decode(handler=handler).map(picky, handler=handler)
    )
    return keys(dataset), dict(counts)


def check_a_damaged_image_in_the_middle(wds, folder):
    url = captioned(folder)
    found = []
    for handler in (wds.ignore_and_continue, wds.warn_and_continue, wds.ignore_and_stop):
        dataset = wds.WebDataset(url, shardshuffle=False).decode("torchrgb8", handler=handler)
        found.append(keys(dataset))
    return found


def without_pickles(sample):
    return {name: value for name, value in sample.items() if name.lower() != "pyd"}


def check_own_decoders_by_extension(wds, folder):
    def left_right(key, data):
        if key not in (".left.png", ".right.png"):
            return None
        return Image.open(io.BytesIO(data)).size

    dataset = wds.WebDataset(str(Path(folder) / "media.tar"), shardshuffle=False)
    dataset = dataset.select(lambda sample: "png" in sample).map(without_pickles)
    by_suffix = dataset.decode(wds.handle_extension("left.png", lambda data: len(data)), "l8")
    by_function = dataset.decode(left_right, "pill", only=["png", "left.png"])
    (one,), (two,) = list(by_suffix), list(by_function)
    return (
        one["left.png"],
        list(one["png"].shape),
        list(two["left.png"]),
        two["png"].mode,
        type(two["npy"]).__name__,
    )


def check_a_scheme_of_the_program(wds, folder):
    memory = {}
    gopen = module(wds, "gopen")

    class Kept(io.BytesIO):
        def __init__(self, url):
            super().__init__()
            self.url = url

        def close(self):
            memory[self.url] = self.getvalue()
            super().close()

    def opener(url, mode="rb", bufsize=8192, **kw):
        return Kept(url) if mode.startswith("w") else io.BytesIO(memory[url])

    gopen.gopen_schemes["kept"] = opener
    try:
        with wds.ShardWriter(
            "kept://x-%d.tar", maxcount=2, opener=partial(gopen.gopen, mode="wb"), verbose=0
        ) as sink:
            for n in range(5):
                sink.write({"__key__": str(n), "txt": str(n)})
        dataset = wds.WebDataset([*memory], shardshuffle=False).decode()
        return sorted(memory), [sample["txt"] for sample in dataset]
    finally:
        del gopen.gopen_schemes["kept"]


def check_items_cached_in_memory(wds, folder):
    calls = []

    def slow(sample):
        calls.append(sample["__key__"])
        return sample["cls"]

    dataset = plain(wds, folder).slice(6).map(slow).mcached()
    return [list(dataset) for _ in range(3)], len(calls)


def check_files_selected_and_renamed(wds, folder):
    dataset = wds.WebDataset(
        shards(folder),
        shardshuffle=False,
        select_files=lambda name: not name.endswith(".json"),
        rename_files=lambda name: name.replace(".txt", ".text.txt"),
        detshuffle=True,
    )
    return [sorted(sample) for sample in dataset.slice(2)], len(list(dataset))


def check_nodes_and_workers_of_an_environment(wds, folder):
    found = []
    for rank in range(2):
        for worker in range(2):
            place = {"RANK": rank, "WORLD_SIZE": 2, "WORKER": worker, "NUM_WORKERS": 2}
            with environment(**{name: str(value) for name, value in place.items()}):
                dataset = plain(wds, folder, nodesplitter=wds.split_by_node)
                found.append((keys(dataset), list(module(wds, "utils").pytorch_worker_info())))
    return found


def check_a_reader_of_one_tar_file(wds, folder):
    tariterators = module(wds, "tariterators")
    with open(first(folder), "rb") as stream:
        names = [file["fname"] for file in tariterators.tar_file_iterator(stream)]
    samples = list(tariterators.tarfile_samples([{"url": first(folder)}]))
    return names[:4], len(names), keys(samples)


def check_options_of_tar_writers(wds, folder):
    found = []
    for n, options in enumerate(
        [
            {"encoder": False, "mode": 0o600, "user": "me", "group": "us"},
            {"encoder": True, "user": "me", "group": "us"},
            {"compress": True, "encoder": False},
        ]
    ):
        path = Path(folder) / f"options-{n}.tar"
        with wds.TarWriter(str(path), **options) as sink:
            size = sink.write({"__key__": "a/b", "txt": b"text"})
        with tarfile.open(path) as tar:
            members = [(m.name, m.size, m.mode, m.uname, m.gname) for m in tar]
        owner = "user" in options
        found.append([m if owner else m[:3] for m in members])
        found.append((size, path.read_bytes()[:2] == b"\x1f\x8b"))
    return found


def check_batches_loaded_by_torch(wds, folder):
    def collate(items):
        return {"keys": [key for key, _ in items], "sum": sum(n for _, n in items)}

    dataset = plain(wds, folder).decode().to_tuple("__key__", "cls")
    found = []
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=4, num_workers=workers, collate_fn=collate, drop_last=True
        )
        found.append(list(loader))
        loader = wds.WebLoader(
            dataset, batch_size=4, num_workers=workers, collate_fn=collate, drop_last=True
        )
        found.append(list(loader))
    return found


def check_a_loader_that_mixes_batches_again(wds, folder):
    dataset = plain(wds, folder).decode().to_tuple("txt", "cls").batched(5)
    loader = wds.WebLoader(dataset, num_workers=2, batch_size=None)
    loader = loader.unbatched().shuffle(30).batched(8).with_length(3, silent=True)
    found = list(loader)
    return (
        sorted(text for texts, _ in found for text in texts),
        [len(texts) for texts, _ in found],
        [list(labels.shape) for _, labels in found],
        len(loader),
    )


def check_a_mixture_of_three_with_shares(wds, folder):
    sets = [plain(wds, folder).map(lambda s, n=n: n).repeat(9) for n in range(3)]
    counts = Counter(wds.DataPipeline(wds.RandomMix(sets, [9, 3, 0.001]), wds.slice(120)))
    return counts[0] > counts[1] > counts[2], sum(counts.values())


def check_keys_decoded_by_patterns(wds, folder):
    dataset = plain(wds, folder).xdecode(
        ("*.txt", lambda stream: stream.read().decode().upper()), must_decode=False
    )
    return [(sorted(sample), str(sample["txt"])) for sample in dataset.slice(2)]


def check_a_pipeline_of_plain_functions(wds, folder):
    filters = module(wds, "filters")
    source = iter(plain(wds, folder))
    source = filters._shuffle(source, 10, 2)
    source = filters._decode(source)
    source = filters._to_tuple(source, "cls", "txt")
    source = filters._batched(source, 6)
    return sorted(text for _, texts in source for text in texts)[:4]
