"""Programs as public projects have them, with several parts of the library in each."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import torch
from common import config, cooked, describe, document, encoder, flat, loader, prepare, train, val
from PIL import Image


def number(sample):
    return int(sample.text.split()[1])


def images(energon, folder, name="questions", kind="PNG", description=None):
    """Return a dataset of images with questions, as visual question answering has them."""
    path = Path(folder) / name
    if path.exists():
        return path
    path.mkdir()
    with tarfile.open(path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for n in range(6):
            buffer = io.BytesIO()
            Image.fromarray(np.full((4 + n, 5, 3), 40 * n, np.uint8)).save(buffer, kind)
            about = {
                "q": f"how many {n}?",
                "answers": [{"a": str(n)}, {"a": "none"}],
                "box": [n, 2],
            }
            parts = [("jpg", buffer.getvalue()), ("json", json.dumps(about).encode())]
            for part, content in [*parts, ("txt", f"context {n}".encode())]:
                info = tarfile.TarInfo(f"s{n}.{part}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    prepare(energon, path, split_parts_patterns=[("train", "a.tar"), ("val", "a.tar")])
    describe(path, description or vqa("json[q]", "json[answers][0][a]"))
    return path


def vqa(context, answers):
    kind = {"__module__": "megatron.energon", "__class__": "VQASample"}
    fields = {"image": "jpg", "context": context, "answers": answers}
    return {"sample_type": kind, "field_map": fields}


def tokens_encoder(energon, **hooks):
    """Return an encoder to tokens, which a program packs or groups."""

    @dataclasses.dataclass
    class Tokens(energon.Sample):
        tokens: torch.Tensor
        text: str

    def encode_sample(self, sample):
        size = number(sample) % 4 + 1
        return Tokens.derive_from(
            sample, tokens=torch.full((size,), number(sample)), text=sample.text
        )

    hooks.setdefault("encode_sample", energon.stateless(encode_sample))
    return encoder(energon, **hooks)


def check_questions_about_images(energon, folder):
    path = images(energon, folder)

    class Encoder(energon.DefaultTaskEncoder):
        decoder = energon.SampleDecoder(image_decode="pilrgb")

        @energon.stateless
        def encode_sample(self, sample):
            image = np.asarray(sample.image)
            return dataclasses.replace(
                sample, image=torch.tensor(image.shape), context=sample.context.upper()
            )

    found = []
    for batch in loader(energon, val(energon, path, task_encoder=Encoder(), batch_size=4)):
        found.append((batch.image.tolist(), batch.context, batch.answers, batch.__key__))
    return found


def check_images_as_tensors(energon, folder):
    path = images(energon, folder)
    found = []
    for decode in ("torchrgb", "torchrgb8", "rgb8", "l8", "pil"):
        kind = type(
            "Encoder",
            (energon.DefaultTaskEncoder,),
            {"decoder": energon.SampleDecoder(image_decode=decode)},
        )
        sample = next(
            iter(loader(energon, val(energon, path, task_encoder=kind(), batch_size=None)))
        )
        image = sample.image
        shape = image.size if decode == "pil" else image.shape
        found.append(
            (
                type(image).__name__.replace("PngImageFile", "Image"),
                list(shape),
                str(getattr(image, "dtype", "")),
            )
        )
    return found


def check_padded_batches(energon, folder):
    path = images(energon, folder)

    class Encoder(energon.DefaultTaskEncoder):
        def batch(self, samples):
            return super().batch(samples)

    batches = loader(energon, val(energon, path, task_encoder=Encoder(), batch_size=3))
    return [(list(batch.image.shape), float(batch.image.sum())) for batch in batches]


def check_fields_of_json(energon, folder):
    path = images(energon, folder, "fields", description=vqa("txt", "json[box][1]"))
    samples = loader(
        energon, val(energon, path, task_encoder=energon.DefaultTaskEncoder(), batch_size=None)
    )
    return [(sample.context, sample.answers, sample.__key__) for sample in samples]


def check_samples_of_several_kinds_in_groups(energon, folder):
    """Each batch has samples of one length, and the batch says which."""

    def batch_group_criterion(self, sample):
        return len(sample.tokens), 3

    def batch(self, samples):
        return {
            "tokens": torch.stack([sample.tokens for sample in samples]),
            "texts": [sample.text for sample in samples],
            "__key__": [sample.__key__ for sample in samples],
            "__restore_key__": [sample.__restore_key__ for sample in samples],
        }

    hooks = {
        "batch_group_criterion": energon.stateless(batch_group_criterion),
        "batch": energon.stateless(batch),
    }
    made = tokens_encoder(energon, **hooks)
    dataset = val(energon, Path(folder) / "texts", task_encoder=made, batch_size=None)
    batches = list(loader(energon, dataset))
    return sorted((list(batch["tokens"].shape), sorted(batch["texts"])) for batch in batches)


def check_packs_of_yielded_samples(energon, folder):
    def encode_sample(self, sample):
        for part in range(number(sample) % 3):
            yield dataclasses.replace(sample, text=f"{sample.text} {part}")

    def select_samples_to_pack(self, samples):
        return [samples[n : n + 3] for n in range(0, len(samples), 3)]

    def pack_selected_samples(self, samples):
        return energon.TextSample.derive_from(samples[0], text="+".join(s.text for s in samples))

    hooks = {
        "encode_sample": energon.stateless(encode_sample),
        "select_samples_to_pack": select_samples_to_pack,
        "pack_selected_samples": energon.stateless(pack_selected_samples),
    }
    dataset = val(
        energon,
        Path(folder) / "texts",
        task_encoder=encoder(energon, **hooks),
        batch_size=2,
        packing_buffer_size=6,
    )
    running = loader(energon, dataset)
    batches = list(running)
    packs = flat(list(batch.text) for batch in batches)
    parts = sorted(flat(text.split("+") for text in packs))
    return parts, sum(len(batch.text) for batch in batches)


def check_preencoded_packs_go_on(energon, folder):
    def preencode_sample(self, sample):
        return dataclasses.replace(sample, text=f"pre {number(sample)}")

    def select_samples_to_pack(self, samples):
        chosen = sorted(samples, key=lambda sample: sample.__key__)
        return [chosen[:2], chosen[2:]]

    def postencode_sample(self, sample):
        return dataclasses.replace(sample, text=f"post {sample.text}")

    def pack_selected_samples(self, samples):
        return energon.TextSample.derive_from(samples[0], text="|".join(s.text for s in samples))

    def make():
        hooks = {
            "preencode_sample": energon.stateless(preencode_sample),
            "select_samples_to_pack": select_samples_to_pack,
            "postencode_sample": energon.stateless(postencode_sample),
            "pack_selected_samples": energon.stateless(pack_selected_samples),
        }
        made = encoder(energon, **hooks)
        path = Path(folder) / "texts"
        return loader(
            energon, train(energon, path, task_encoder=made, batch_size=1, packing_buffer_size=4)
        )

    running = make()
    batches = iter(running)
    first = [next(batches).text for _ in range(3)]
    state = running.save_state_rank()
    rest = [batch.text for batch in batches]
    resumed = make()
    resumed.restore_state_rank(state)
    return (
        [batch.text for batch in resumed] == rest,
        len(first + rest),
        sorted(flat(first + rest))[0][:5],
    )


def check_subsets_with_shares_in_a_blend(energon, folder):
    parts = [
        {"path": "./texts", "subset": {"range": ["25%", "75%"]}, "repetitions": 2},
        {"path": "./more", "subset": {"range": [3, 9]}},
    ]
    splits = {"train": {"blend_epochized": parts}, "val": {"path": "./texts"}}
    path = document(folder, "shares", __class__="MetadatasetV2", splits=splits)
    found = sorted(flat(batch.text for batch in loader(energon, train(energon, path))))
    return found, len(train(energon, path, batch_size=None))


def check_hooks_that_ask_for_worker_and_rank(energon, folder):
    def encode_sample(self, sample):
        where = energon.WorkerConfig.active_worker_config
        text = f"{where.rank} {where.world_size} {where.num_workers} {sample.text[:5]}"
        return dataclasses.replace(sample, text=text)

    made = encoder(energon, encode_sample=energon.stateless(encode_sample))
    found = []
    for rank in range(2):
        where = energon.WorkerConfig(rank=rank, world_size=2, num_workers=1)
        dataset = energon.get_val_dataset(
            Path(folder) / "texts", worker_config=where, task_encoder=made, batch_size=2
        )
        found += flat(batch.text for batch in loader(energon, dataset))
    return sorted(set(found))


def check_flavors_reach_the_batch(energon, folder):
    def encode_sample(self, sample):
        return dataclasses.replace(sample, text=str(sorted(sample.__subflavors__.items())))

    @energon.stateless
    def cook(sample):
        return cooked(energon, sample)

    hooks = {"cookers": [energon.Cooker(cook)], "encode_sample": energon.stateless(encode_sample)}
    parts = [
        {"path": "./texts", "subflavors": {"task": "a", "of": "document"}},
        {"path": "./more", "subflavors": {"task": "b"}},
    ]
    splits = {"train": {"path": "./texts"}, "val": {"blend": parts}}
    path = document(folder, "flavored", __class__="MetadatasetV2", splits=splits)
    dataset = val(energon, path, task_encoder=encoder(energon, **hooks))
    batches = list(loader(energon, dataset))
    return sorted(set(flat(batch.text for batch in batches)))


def check_sources_of_packs_and_batches(energon, folder):
    def select_samples_to_pack(self, samples):
        return [samples]

    def pack_selected_samples(self, samples):
        return energon.TextSample.derive_from(samples[0], text=" ".join(s.text for s in samples))

    hooks = {
        "select_samples_to_pack": select_samples_to_pack,
        "pack_selected_samples": energon.stateless(pack_selected_samples),
    }
    dataset = val(
        energon,
        Path(folder) / "texts",
        task_encoder=encoder(energon, **hooks),
        batch_size=1,
        packing_buffer_size=3,
    )
    batches = list(loader(energon, dataset))
    about = [str(batch.__sources__).count("SourceInfo(") for batch in batches]
    return [list(batch.text) for batch in batches], about


def check_a_chain_of_wrappers(energon, folder):
    where = config(energon)
    dataset = val(energon, Path(folder) / "texts", batch_size=None)
    mapped = energon.MapDataset(
        dataset,
        lambda sample: dataclasses.replace(sample, text=sample.text.upper()),
        worker_config=where,
    )
    filtered = energon.FilterDataset(
        mapped, filter_fn=lambda sample: number(sample) % 2 == 0, worker_config=where
    )
    repeated = energon.RepeatDataset(filtered, repeats=2, worker_config=where)
    limited = energon.LimitDataset(repeated, length=5, worker_config=where)
    return [sample.text for sample in loader(energon, limited)]


def check_an_iterator_as_megatron_lm_has_it(energon, folder):
    class EnergonDataloader:
        def __init__(self, dataloader):
            self._dataloader = dataloader
            self._iter = iter(cyclic_iter(dataloader))

        def __next__(self):
            return self._iter.__next__()

        def __iter__(self):
            return self._iter.__iter__()

        def save_state(self):
            return self._dataloader.save_state_rank()

    def cyclic_iter(iterable):
        while True:
            yield from iterable

    dataset = train(
        energon, Path(folder) / "texts", epoch=False, batch_size=4, virtual_epoch_length=3
    )
    running = EnergonDataloader(loader(energon, dataset))
    first = [list(next(running).text) for _ in range(7)]
    state = running.save_state()
    rest = [list(next(running).text) for _ in range(3)]
    other = loader(
        energon,
        train(energon, Path(folder) / "texts", epoch=False, batch_size=4, virtual_epoch_length=3),
    )
    other.restore_state_rank(state)
    resumed = EnergonDataloader(other)
    return [list(next(resumed).text) for _ in range(3)] == rest, len(set(flat(first)))


def check_loops_without_repetition(energon, folder):
    """Each loop has all samples, in another order."""
    running = loader(energon, train(energon, Path(folder) / "texts", batch_size=2))
    loops = [flat(batch.text for batch in running) for _ in range(4)]
    return [sorted(loop) == sorted(loops[0]) for loop in loops], len(
        {tuple(loop) for loop in loops}
    ) > 2


def check_derived_samples_keep_their_keys(energon, folder):
    @dataclasses.dataclass
    class Long(energon.TextSample):
        length: int

    def encode_sample(self, sample):
        longer = Long.extend(sample, length=len(sample.text))
        return Long.derive_from(longer, text=longer.text, length=longer.length + 1)

    made = encoder(energon, encode_sample=energon.stateless(encode_sample))
    batches = loader(energon, val(energon, Path(folder) / "texts", task_encoder=made))
    return [(batch.__key__, [int(n) for n in batch.length]) for batch in batches]
