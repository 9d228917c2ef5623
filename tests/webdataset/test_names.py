"""The names that programs written for webdataset import."""

from __future__ import annotations

import importlib
import inspect
import io
from time import process_time

import numpy as np
import pytest

import energon.webdataset as wds
from energon.errors import ConfigError, DecodeError, SecurityError
from energon.webdataset import names
from tests.commands import run_python
from tests.webdataset.shards import make_shards

# What programs import that is not in the recorded names of webdataset (`test_webdataset_names`).
FORMER_NAMES = {
    "": "slice Processor ShardList PytorchShardList cbors_to_samples cbors2_to_samples",
    "cache": "cached_url_opener",
    "pytorch": "DataLoader IterableDataset",
    "wids": "ChunkedSampler DistributedChunkedSampler ShardListDataset ShardedSampler",
}


def test_former_names_are_found_where_programs_import_them():
    for module, members in FORMER_NAMES.items():
        home = importlib.import_module(f"energon.webdataset.{module}".rstrip("."))
        assert [name for name in members.split() if not hasattr(home, name)] == []


def test_names_can_be_listed_before_they_are_used():
    assert {*names.HOMES, *FORMER_NAMES[""].split()} <= set(dir(wds))


def test_public_names_are_in_the_modules_that_the_stub_names():
    for name, home in names.HOMES.items():
        assert home == names.PACKAGE or name in vars(importlib.import_module(home)), name


def test_a_function_and_a_module_have_the_same_name():
    assert callable(wds.gopen)
    importlib.import_module("energon.webdataset.gopen")
    assert callable(wds.gopen)


@pytest.mark.parametrize(("name", "hint"), [("MultiDataset", "WebLoader"), ("dbcache", "mcached")])
def test_names_that_are_gone_say_what_to_use(name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(wds, name)


@pytest.mark.slow
def test_pipelines_run_without_importing_torch():
    program = (
        "import sys, energon.webdataset as wds\n"
        "assert 'numpy' not in sys.modules\n"
        "data = wds.DataPipeline([1, 2, 3], wds.shuffle(2), wds.batched(2))\n"
        "list(data)\n"
        "assert 'torch' not in sys.modules\n"
        "import torch.utils.data\n"
        "assert isinstance(data, torch.utils.data.IterableDataset)\n"
        "assert issubclass(wds.WebDataset, torch.utils.data.IterableDataset)\n"
        "assert len(list(torch.utils.data.DataLoader(data, batch_size=None))) == 2\n"
    )
    run_python(program)


def test_small_datasets_and_helpers():
    assert list(wds.DataPipeline([1, 2, 3], wds.with_epoch(2))) == [1, 2]
    sized = wds.with_length([1, 2], 5)
    assert (len(sized), list(sized)) == (5, [1, 2])
    batches = [([1, 2],), ([3],)]
    assert list(wds.repeatedly(batches, nsamples=4)) == [*batches, batches[0]]
    assert wds.utils.make_seed("a", 1) == wds.utils.make_seed("a", 1) != wds.utils.make_seed("b", 1)
    assert wds.pipe_cleaner("pipe:curl -s http://x/y.tar | cat") == "http://x/y.tar"

    @wds.utils.deprecated("use other")
    def old():
        return 1

    with pytest.warns(DeprecationWarning, match="old is deprecated: use other"):
        assert old() == 1


def test_equal_steps_by_the_old_name():
    dataset = wds.DataPipeline([*range(10)])
    assert len(list(wds.ddp_equalize(dataset, 7))) == 7
    resized = wds.ResizedDataset([*range(10)], 4, nominal=9)
    assert (len(resized), list(resized), list(resized)) == (9, [0, 1, 2, 3], [4, 5, 6, 7])
    assert len(wds.FakeLength([1], 77)) == 77


def test_loading_without_torch():
    loader = wds.multi.MultiLoader([*range(10)], workers=2)
    assert sorted(set(loader)) == [*range(10)]
    loader.close()


def test_base_plus_ext():
    from energon.webdataset.tariterators import base_plus_ext

    assert base_plus_ext("a/b.c.d") == ("a/b", "c.d")
    assert base_plus_ext("noext") == (None, None)
    assert base_plus_ext("a/.b") == ("a/", "b")
    assert base_plus_ext("a.b/.c") == (None, None)


def test_arrays_of_tenbin_have_texts_and_are_read_a_few_at_a_time(tmp_path):
    from energon.webdataset import tenbin

    arrays = [np.arange(number) for number in (1, 2, 3)]
    data = tenbin.encode_buffer(arrays, infos=["one", "", "eightest"])
    found, infos = tenbin.decode_buffer(data, infos=True)
    assert infos == ["one", "", "eightest"]
    assert all(map(np.array_equal, found, arrays))
    assert len(tenbin.decode_buffer(data, infos=infos)) == 3
    with pytest.raises(DecodeError, match="expected \\["):
        tenbin.decode_buffer(data, infos=["one", "two", "three"])
    with pytest.raises(ConfigError, match="infos for 1"):
        tenbin.encode_buffer(arrays, infos=["one"])
    with pytest.raises(ValueError, match="8 ASCII letters"):
        tenbin.encode_buffer(arrays[:1], infos=["ninelette"])
    stream = io.BytesIO(data)
    assert [len(tenbin.read(stream, 2)), len(tenbin.read(stream, 2))] == [2, 1]
    with pytest.raises(DecodeError):
        tenbin.read(io.BytesIO(data[:30]), 1)


# Arguments that webdataset passes on, or has in classes that are not among its public names.
ARGUMENTS = {
    "WebLoader": "dataset batch_size num_workers collate_fn pin_memory drop_last timeout "
    "worker_init_fn multiprocessing_context prefetch_factor",
    "DirectoryShardList": "path pattern poll timeout mode select fate",
    "decode": "handler pre post only partial",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_their_names(name):
    known = inspect.signature(getattr(wds, name)).parameters
    missing = set(ARGUMENTS[name].split()) - set(known)
    assert not missing or any(each.kind == each.VAR_KEYWORD for each in known.values()), missing


def test_functions_behind_openers_and_codecs(tmp_path):
    from energon.webdataset import autodecode, writer

    gopen = importlib.import_module("energon.webdataset.gopen")
    assert autodecode.cbor_loads(writer.cbor_dumps([1])) == [1]
    (shard,) = make_shards(tmp_path, [1])
    with gopen.gopen_file(shard) as file:
        assert len(file.read(9)) == 9
    with pytest.raises(SecurityError):
        gopen.gopen_pipe("pipe:true")
    failing = gopen.gopen("pipe:exit 3", allow=("shell",))
    assert gopen.set_options(failing, ignore_status=[3])
    assert failing.read() == b""
    with pytest.raises(ConfigError, match="no opener"):
        gopen.gopen_error("x:y")


@pytest.mark.parametrize("segment", ["a/", "/", "a.b/"])
def test_base_plus_ext_takes_linear_time(segment):
    from energon.webdataset.tariterators import base_plus_ext

    began = process_time()
    base_plus_ext(segment * 40_000)
    assert process_time() - began < 1  # a quadratic search takes a minute
