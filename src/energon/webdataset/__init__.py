"""WebDataset pipelines: streaming over tar files, from any storage.

    import energon.webdataset as wds

    dataset = wds.WebDataset("shards/{000..127}.tar", shardshuffle=True)
    dataset = dataset.shuffle(1000).decode("rgb").to_tuple("jpg;png", "json").batched(16)

The names, arguments and meaning are those of the webdataset library. Names are looked up when
they are first used, so importing this costs next to nothing, and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# A function and a module have this name. The module is imported first, once and for all.
from energon.webdataset.gopen import gopen as gopen

if TYPE_CHECKING:
    from energon.webdataset import utils as utils

__version__ = "1.0.2"
"""The release of webdataset whose interface this is."""

_NAMES = {
    "autodecode": [
        "Continue",
        "Decoder",
        "DecodingError",
        "ImageHandler",
        "basichandlers",
        "gzfilter",
        "handle_extension",
        "imagehandler",
        "pytorch_weights_only",
        "torch_audio",
        "torch_loads",
        "torch_video",
    ],
    "cache": [
        "FileCache",
        "LRUCleanup",
        "StreamingOpen",
        "cached_tarfile_samples",
        "cached_tarfile_to_samples",
        "pipe_cleaner",
    ],
    "compat": [
        "FakeLength",
        "FluidInterface",
        "FluidWrapper",
        "Processor",
        "PytorchShardList",
        "ResizedDataset",
        "ShardList",
        "WebDataset",
        "ddp_equalize",
    ],
    "dataset_spec": ["DatasetSpec", "load_spec"],
    "extradatasets": ["MockDataset", "with_epoch", "with_length"],
    "filters": [
        "Cached",
        "LMDBCached",
        "associate",
        "batched",
        "decode",
        "default_collation_fn",
        "detshuffle",
        "extract_keys",
        "flatmap",
        "getfirst",
        "info",
        "listed",
        "log_keys",
        "map",
        "map_dict",
        "map_tuple",
        "pipelinefilter",
        "rename",
        "rename_keys",
        "rsample",
        "select",
        "shuffle",
        "slice",
        "to_tuple",
        "transform_with",
        "unbatched",
        "unlisted",
        "xdecode",
    ],
    "gopen": ["gopen_schemes"],
    "handlers": [
        "ignore_and_continue",
        "ignore_and_stop",
        "reraise_exception",
        "warn_and_continue",
        "warn_and_stop",
    ],
    "mix": ["RandomMix", "RoundRobin", "mixture"],
    "pipeline": ["DataPipeline"],
    "pytorch": ["DataLoader", "IterableDataset", "TorchTensor"],
    "records": [
        "cbors2_to_samples",
        "cbors_to_samples",
        "jsonl_to_samples",
        "msgpacks_to_samples",
    ],
    "reading.shard_sources": ["DirectoryShardList", "MultiShardSample", "shardspec"],
    "shardlists": [
        "ResampledShardList",
        "ResampledShards",
        "SimpleShardList",
        "non_empty",
        "resampled",
        "single_node_only",
        "split_by_node",
        "split_by_worker",
    ],
    "stages.make": ["PipelineStage"],
    "tariterators": [
        "base_plus_ext",
        "group_by_keys",
        "tar_file_expander",
        "tar_file_iterator",
        "tarfile_samples",
        "tarfile_to_samples",
        "url_opener",
        "valid_sample",
    ],
    "reading.urls": ["expand_urls"],
    "utils": ["repeatedly"],
    "web_loader": ["WebLoader"],
    "writer": ["ShardWriter", "TarWriter", "imageencoder", "numpy_dumps", "torch_dumps"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = frozenset(
    {
        *("autodecode", "cache", "compat", "extradatasets", "filters", "handlers", "mix", "multi"),
        *("pipeline", "pytorch", "shardlists", "tariterators", "tenbin", "utils", "wids", "writer"),
    }
)

__all__ = sorted([*_HOME, "gopen"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(_unknown(name))
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _unknown(name: str) -> str:
    from energon.webdataset.compat import HINTS

    hint = f"; {HINTS[name]}" if name in HINTS else ""
    return f"module {__name__!r} has no attribute {name!r}{hint}"
