"""Programs of projects that read what others wrote: audio, captions, converters."""

from __future__ import annotations

import io
import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from common import keys, module, plain, shards, write_tar
from projects import captioned


def sounds(folder):
    """Shards of raw 16 bit samples with captions, as CLAP and NeMo have them; return a pattern."""
    path = Path(folder) / "sounds"
    path.mkdir(exist_ok=True)
    for shard in range(3):
        members = []
        for n in range(4 * shard, 4 * shard + 4):
            audio = np.arange(n, 2 * n + 3, dtype="<i2").tobytes()
            members.append((f"clip{n:02}.flac", audio))
            members.append((f"clip{n:02}.json", json.dumps({"text": [f"sound {n}"]}).encode()))
        write_tar(path / f"{shard}.tar", members)
    return f"{path}/{{0..2}}.tar"


def as_audio(key, data):
    """Decode as `torch_audio` does."""
    if key.rpartition(".")[2] != "flac":
        return None
    return torch.from_numpy(np.frombuffer(data, "<i2").astype(np.float32))[None], 48000


def check_a_loader_as_clap_has_it(wds, folder):
    def log_and_continue(exn):
        return True

    def collate(samples):
        longest = max(each["flac"][0].shape[-1] for each in samples)
        padded = [
            torch.nn.functional.pad(s["flac"][0][0], (0, longest - s["flac"][0].shape[-1]))
            for s in samples
        ]
        return {
            "waveform": torch.stack(padded),
            "text": [each["json"]["text"][0] for each in samples],
            "__key__": [each["__key__"] for each in samples],
        }

    pipeline = [wds.SimpleShardList(sounds(folder))]
    pipeline.extend(
        [
            wds.detshuffle(bufsize=2000, initial=500, seed=3),
            wds.split_by_node,
            wds.split_by_worker,
            wds.tarfile_to_samples(handler=log_and_continue),
            wds.shuffle(bufsize=5000, initial=1000, rng=random.Random(3)),
        ]
    )
    pipeline.append(wds.decode(as_audio))
    pipeline.append(wds.batched(5, partial=False, collation_fn=collate))
    dataset = wds.DataPipeline(*pipeline)
    loader = wds.WebLoader(dataset, batch_size=None, shuffle=False, num_workers=0, pin_memory=False)
    loader.num_batches, loader.num_samples = 2, 10
    batches = list(loader)
    found = [each for batch in batches for each in batch["text"]]
    return len(batches), len(set(found)), batches[0]["waveform"].dtype == torch.float32


def check_an_audio_dataset_that_is_a_subclass(wds, folder):
    class Clips(wds.WebDataset):
        def __init__(self, urls, size, shuffle=None, transforms=None):
            super().__init__(urls, handler=wds.warn_and_continue, shardshuffle=False)
            self.size = size
            self.append(wds.decode(as_audio, handler=wds.warn_and_continue))
            if shuffle is not None:
                self.append(wds.shuffle(shuffle))
            self.append(wds.select(lambda sample: sample["flac"][0].numel() > 0))
            self.append(wds.map_dict(flac=self.crop, handler=wds.warn_and_continue))
            self.append(wds.to_tuple("flac", "json"))

        def crop(self, audio):
            return audio[0][:, : self.size]

    found = list(Clips(sounds(folder), 4))
    return [(tuple(audio.shape), about["text"]) for audio, about in found]


def check_a_stage_that_cuts_clips(wds, folder):
    def pieces(source, size=4):
        for sample in source:
            (audio, rate) = sample["flac"]
            for number, piece in enumerate(audio[0].split(size)):
                yield {
                    "__key__": f"{sample['__key__']}-{number}",
                    "wav": piece.tolist(),
                    "rate": rate,
                    "url": Path(sample["__url__"]).name,
                }

    dataset = wds.WebDataset(sounds(folder), shardshuffle=False).decode(as_audio).compose(pieces)
    found = list(dataset.slice(0, 20, 3))
    return [(each["__key__"], each["wav"], each["rate"], each["url"]) for each in found]


def check_tarred_audio_as_nemo_reads_it(wds, folder):
    manifest = {f"clip{n:02}": [(0, n), (1, n)] if n % 4 == 1 else [(0, n)] for n in range(0, 12)}
    del manifest["clip07"]

    def known(iterator):
        for audio, name in iterator:
            if name in manifest:
                yield audio, name

    def offsets(iterator):
        for audio, name in iterator:
            for number, text in manifest[name]:
                yield audio, name, number, text

    def build(sample):
        audio, name, number, text = sample
        return len(io.BytesIO(audio).read()), name, number, text

    dataset = wds.DataPipeline(
        wds.SimpleShardList(urls=sounds(folder)),
        wds.shuffle(0),
        wds.tarfile_to_samples(),
        wds.rename(audio="wav;mp3;flac;opus", key="__key__"),
        wds.to_tuple("audio", "key"),
        known,
        offsets,
        wds.map(build),
    )
    return list(iter(dataset))


def check_a_dataset_of_a_framework_around_a_pipeline(wds, folder):
    class Audio:
        def __init__(self, location):
            self.inner_dataset = wds.DataPipeline(
                wds.ResampledShards(location),
                wds.tarfile_to_samples(handler=wds.warn_and_continue),
                wds.shuffle(10, handler=wds.warn_and_continue),
                wds.decode(as_audio, handler=wds.warn_and_continue),
                wds.to_tuple("flac", "json", handler=wds.warn_and_continue),
                wds.map_tuple(self.audio, self.text, handler=wds.warn_and_continue),
                wds.map(self.to_dict, handler=wds.warn_and_continue),
            )

        def audio(self, sound):
            return sound[0].shape[-1]

        def text(self, about):
            return about["text"][0]

        def to_dict(self, sample):
            return {"audio": sample[0], "text_input": sample[1]}

    found = list(islice(Audio(sounds(folder)).inner_dataset, 40))
    known = {(int(each["text_input"].split()[1]) + 3, each["audio"]) for each in found}
    return len(found), all(expected == length for expected, length in known)


def check_a_subset_as_datacomp_selects_it(wds, folder):
    """Samples whose number is on a list, by `searchsorted`, over captions of img2dataset."""
    wanted = np.sort(np.array([1, 4, 5, 9]))

    def is_wanted(sample):
        number = int(sample["__key__"][-4:])
        place = np.searchsorted(wanted, number)
        return bool(place < len(wanted) and wanted[place] == number)

    dataset = wds.WebDataset(captioned(folder), shardshuffle=False, handler=wds.warn_and_continue)
    found = keys(dataset.select(is_wanted))
    names = keys(wds.WebDataset(captioned(folder), shardshuffle=False))
    return found, len(names)


def check_a_converter_to_another_format(wds, folder):
    """Samples become records in files of limited size, and a list of these, as converters do."""
    uploaded = []
    pattern = str(Path(folder) / "converted-%03d.tar")
    with wds.ShardWriter(pattern, maxcount=6, post=uploaded.append, verbose=0) as sink:
        for number, sample in enumerate(plain(wds, folder).decode()):
            if sample["cls"] == 2:
                continue
            tokens = np.arange(sample["json"]["n"], dtype=np.uint16)
            about = {"n": number, "length": len(tokens)}
            sink.write({"__key__": f"{number:08d}", "tokens.npy": tokens, "json": about})
    again = wds.WebDataset(uploaded, shardshuffle=False).decode().to_tuple("tokens.npy", "json")
    found = [(array.dtype.name, len(array), about) for array, about in again]
    return [Path(path).name for path in uploaded], sink.total, found


def check_a_loader_as_a_trainer_of_llava_has_it(wds, folder):
    """Conversations that are tokenized in the pipeline, dropped if too long, and padded."""

    def tokenize(sample):
        words = sample["txt"].split()
        return {"input_ids": torch.tensor([len(word) for word in words]), "key": sample["__key__"]}

    def collate(samples):
        ids = [each["input_ids"] for each in samples]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
        return {"input_ids": padded, "keys": [each["key"] for each in samples]}

    dataset = (
        wds.WebDataset(shards(folder), nodesplitter=wds.split_by_node, shardshuffle=False)
        .decode(only=["txt"])
        .map(tokenize, handler=wds.warn_and_continue)
        .select(lambda sample: len(sample["input_ids"]) < 10)
        .batched(6, collation_fn=collate, partial=True)
        .with_length(4)
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=0)
    found = list(loader)
    return len(dataset), [batch["keys"] for batch in found], found[0]["input_ids"].tolist()


def check_an_item_cut_by_hand(wds, folder):
    """A dataset that a program opens by its parts, as tools that look at shards do."""
    iterators = module(wds, "tariterators")
    urls = iterators.url_opener([{"url": f"{folder}/shard-000001.tar"}])
    files = iterators.tar_file_expander(urls)
    samples = iterators.group_by_keys(files)
    return [(each["__key__"], sorted(each), each["txt"]) for each in islice(samples, 2)]
