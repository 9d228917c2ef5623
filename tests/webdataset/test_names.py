"""The names that programs written for webdataset import."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import energon.webdataset as wds
from energon.webdataset.utils import ObsoleteException

NAMES = [
    "WebDataset",
    "WebLoader",
    "FluidWrapper",
    "FluidInterface",
    "DataPipeline",
    "PipelineStage",
    "SimpleShardList",
    "ResampledShards",
    "MultiShardSample",
    "shardspec",
    "resampled",
    "non_empty",
    "split_by_node",
    "split_by_worker",
    "single_node_only",
    "tarfile_samples",
    "tarfile_to_samples",
    "shuffle",
    "detshuffle",
    "select",
    "decode",
    "map",
    "rename",
    "rename_keys",
    "associate",
    "map_dict",
    "to_tuple",
    "map_tuple",
    "batched",
    "unbatched",
    "rsample",
    "slice",
    "extract_keys",
    "xdecode",
    "info",
    "Cached",
    "LMDBCached",
    "getfirst",
    "transform_with",
    "pipelinefilter",
    "Decoder",
    "Continue",
    "DecodingError",
    "gzfilter",
    "handle_extension",
    "imagehandler",
    "torch_loads",
    "torch_audio",
    "torch_video",
    "pytorch_weights_only",
    "TarWriter",
    "ShardWriter",
    "numpy_dumps",
    "torch_dumps",
    "tenbin",
    "gopen",
    "gopen_schemes",
    "LRUCleanup",
    "pipe_cleaner",
    "reraise_exception",
    "ignore_and_continue",
    "ignore_and_stop",
    "warn_and_continue",
    "warn_and_stop",
    "RandomMix",
    "RoundRobin",
    "MockDataset",
    "with_epoch",
    "with_length",
    "repeatedly",
    "utils",
    "cbors_to_samples",
    "cbors2_to_samples",
    "Processor",
    "ShardList",
    "PytorchShardList",
    "autodecode",
    "cache",
    "compat",
    "extradatasets",
    "filters",
    "handlers",
    "mix",
    "pipeline",
    "pytorch",
    "shardlists",
    "tariterators",
    "writer",
]

DEEP = {
    "filters": "_shuffle getfirst pipelinefilter reraise_exception default_collation_fn unlisted",
    "tariterators": "base_plus_ext url_opener tar_file_expander tar_file_iterator group_by_keys "
    "valid_sample meta_prefix meta_suffix",
    "shardlists": "expand_urls split_by_node",
    "autodecode": "Decoder ImageHandler imagehandler decoders torch_audio torch_loads Continue "
    "DecodingError",
    "handlers": "reraise_exception warn_and_continue",
    "compat": "FluidInterface WebDataset WebLoader",
    "pipeline": "DataPipeline",
    "pytorch": "IterableDataset DataLoader",
    "cache": "cached_url_opener pipe_cleaner FileCache StreamingOpen LRUCleanup",
    "utils": "pytorch_worker_seed pytorch_worker_info make_seed lookup_sym is_iterable identity "
    "glob_with_braces fnmatch_with_braces guess_batchsize repeatedly0 deprecated obsolete "
    "compute_sample_weights enforce_security",
    "writer": "default_handlers TarWriter",
    "gopen": "gopen gopen_schemes Pipe rewrite_url",
    "mix": "RandomMix RoundRobin",
    "extradatasets": "MockDataset",
    "multi": "MultiLoader",
    "tenbin": "encode_buffer decode_buffer load save read write",
    "wids": "ShardListDataset ChunkedSampler DistributedChunkedSampler ShardedSampler",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_library(name):
    assert getattr(wds, name) is not None
    assert name in dir(wds)


@pytest.mark.parametrize("module", DEEP)
def test_names_of_its_modules(module):
    found = importlib.import_module(f"energon.webdataset.{module}")
    for name in DEEP[module].split():
        assert hasattr(found, name), name


def test_a_function_and_a_module_have_the_same_name():
    assert callable(wds.gopen)
    importlib.import_module("energon.webdataset.gopen")
    assert callable(wds.gopen)


@pytest.mark.parametrize(("name", "hint"), [("MultiDataset", "WebLoader"), ("dbcache", "mcached")])
def test_names_that_are_gone_say_what_to_use(name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(wds, name)


def test_pipelines_run_without_importing_torch():
    program = (
        "import sys, energon.webdataset as wds\n"
        "assert 'numpy' not in sys.modules\n"
        "data = wds.DataPipeline([1, 2, 3], wds.shuffle(2), wds.batched(2))\n"
        "list(data)\n"
        "assert 'torch' not in sys.modules\n"
        "import torch.utils.data\n"
        "assert isinstance(data, torch.utils.data.IterableDataset)\n"
        "assert len(list(torch.utils.data.DataLoader(data, batch_size=None))) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_small_datasets_and_helpers(monkeypatch):
    assert list(wds.MockDataset({"a": 1}, 3)) == [{"a": 1}] * 3
    assert list(wds.DataPipeline([1, 2, 3], wds.with_epoch(2))) == [1, 2]
    sized = wds.with_length([1, 2], 5)
    assert (len(sized), list(sized)) == (5, [1, 2])
    batches = [([1, 2],), ([3],)]
    assert list(wds.repeatedly(batches, nbatches=3)) == [*batches, batches[0]]
    assert list(wds.repeatedly(batches, nsamples=4)) == [*batches, batches[0]]
    assert wds.utils.make_seed("a", 1) == wds.utils.make_seed("a", 1) != wds.utils.make_seed("b", 1)
    assert wds.utils.lookup_sym("dumps", ["os", "json"])([1]) == "[1]"
    assert wds.utils.fnmatch_with_braces("a.jpg", "*.{png,jpg}")
    assert wds.utils.compute_sample_weights({"a": 1, "b": 4}) == {"a": 1, "b": 0.25}
    assert wds.pipe_cleaner("pipe:curl -s http://x/y.tar | cat") == "http://x/y.tar"

    @wds.utils.deprecated("use other")
    def old():
        return 1

    with pytest.warns(DeprecationWarning, match="old is deprecated: use other"):
        assert old() == 1

    @wds.utils.obsolete
    def gone():
        return 2

    with pytest.raises(ObsoleteException, match="gone is obsolete"):
        gone()
    monkeypatch.setenv("ALLOW_OBSOLETE", "1")
    assert gone() == 2


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


def test_tenbin_files(tmp_path):
    import numpy as np

    from energon.errors import ConfigError
    from energon.webdataset import tenbin

    arrays = [np.arange(3, dtype=np.float32), np.ones((2, 2), np.int64)]
    tenbin.save(tmp_path / "x.ten", *arrays)
    assert all(map(np.array_equal, tenbin.load(tmp_path / "x.ten"), arrays))
    with pytest.raises(ConfigError, match="ends in .ten"):
        tenbin.load(tmp_path / "x.bin")
