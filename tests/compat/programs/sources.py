"""List, draw, mix and group shards and files."""

from __future__ import annotations

import os
from pathlib import Path

from common import first, keys, module, raised, shards, write_tar


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
    files = list(tariterators.tar_file_expander(streams, eof_value={}))
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
