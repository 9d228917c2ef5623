"""Read shards."""

from __future__ import annotations

import gzip
import os
from itertools import islice
from pathlib import Path

from common import first, keys, plain, raised, shards, write_tar


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
