"""What differs on purpose: see the table at the end of docs/webdataset.md."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from common import keys, plain, shards, write_tar
from projects import environment


def outcome(function):
    """What a function returns, or the builtin error that it raises."""
    try:
        return function()
    except Exception as error:
        kinds = [each.__name__ for each in type(error).__mro__]
        return next(name for name in kinds if name in ("ValueError", "OSError", "Exception"))


def check_two_lists_of_resampled_shards(wds, folder):
    """Whether two equal ones draw alike: on their own, in pipelines, with other seeds."""
    urls = [f"{folder}/drawn-{number}.tar" for number in range(20)]
    for number, url in enumerate(urls):
        write_tar(url, [(f"{number}.txt", b"x")])

    def drawn(**arguments):
        return [each["url"] for each in islice(wds.ResampledShards(urls, **arguments), 20)]

    def read(**arguments):
        source = wds.ResampledShards(urls, **arguments)
        return keys(islice(wds.DataPipeline(source, wds.tarfile_to_samples()), 20))

    return drawn() == drawn(), read() == read(), read(seed=1) == read(seed=2)


def check_fields_of_rare_formats(wds, folder):
    names = ("h5", "hdf", "grib", "bufr", "fits", "mpg", "mpeg", "wmf", "emf", "eps", "ps")

    def decoded(name):
        source = iter([{"__key__": "a", name: b"something"}])
        (sample,) = wds.DataPipeline(lambda: source, wds.decode("rgb"))
        return type(sample[name]).__name__

    return {name: outcome(lambda name=name: decoded(name)) for name in names}


def check_ranks_without_a_splitter(wds, folder):
    def read(rank):
        with environment(RANK=str(rank), WORLD_SIZE="2"):
            return keys(wds.WebDataset(shards(folder), shardshuffle=False))

    return outcome(lambda: [read(0), read(1)])


def check_a_folder_with_a_slash(wds, folder):
    directory = Path(folder) / "slash"
    directory.mkdir()
    write_tar(directory / "0.tar", [("a.txt", b"x")])
    dataset = wds.WebDataset(f"{directory}/", shardshuffle=False, empty_check=False)
    dataset.pipeline[0].poll = None  # do not wait until there are shards
    return keys(dataset), sorted(path.name for path in directory.iterdir())


def check_an_epoch_of_nothing(wds, folder):
    dataset = plain(wds, folder)
    return outcome(lambda: len(list(islice(dataset.with_epoch(0), 100))))
