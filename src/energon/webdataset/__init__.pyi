"""What type checkers see: the public names, where they are at home."""

# ruff: noqa: I001 - one statement for each home

from energon.webdataset import (
    autodecode as autodecode,
    cache as cache,
    compat as compat,
    extradatasets as extradatasets,
    filters as filters,
    handlers as handlers,
    mix as mix,
    multi as multi,
    pipeline as pipeline,
    pytorch as pytorch,
    shardlists as shardlists,
    tariterators as tariterators,
    tenbin as tenbin,
    utils as utils,
    wids as wids,
    writer as writer,
)
from energon.webdataset.autodecode import (
    Continue as Continue,
    Decoder as Decoder,
    DecodingError as DecodingError,
    ImageHandler as ImageHandler,
    basichandlers as basichandlers,
    gzfilter as gzfilter,
    handle_extension as handle_extension,
    imagehandler as imagehandler,
    pytorch_weights_only as pytorch_weights_only,
    torch_audio as torch_audio,
    torch_loads as torch_loads,
    torch_video as torch_video,
)
from energon.webdataset.cache import (
    Cached as Cached,
    LMDBCached as LMDBCached,
    FileCache as FileCache,
    LRUCleanup as LRUCleanup,
    StreamingOpen as StreamingOpen,
    cached_tarfile_samples as cached_tarfile_samples,
    cached_tarfile_to_samples as cached_tarfile_to_samples,
    pipe_cleaner as pipe_cleaner,
)
from energon.webdataset.compat import (
    FakeLength as FakeLength,
    FluidInterface as FluidInterface,
    FluidWrapper as FluidWrapper,
    Processor as Processor,
    PytorchShardList as PytorchShardList,
    ResizedDataset as ResizedDataset,
    ShardList as ShardList,
    WebDataset as WebDataset,
    ddp_equalize as ddp_equalize,
)
from energon.webdataset.dataset_spec import (
    DatasetSpec as DatasetSpec,
    load_spec as load_spec,
)
from energon.webdataset.extradatasets import (
    MockDataset as MockDataset,
    with_epoch as with_epoch,
    with_length as with_length,
)
from energon.webdataset.filters import (
    associate as associate,
    batched as batched,
    decode as decode,
    extract_keys as extract_keys,
    flatmap as flatmap,
    info as info,
    listed as listed,
    log_keys as log_keys,
    map as map,
    map_dict as map_dict,
    map_tuple as map_tuple,
    rename as rename,
    rename_keys as rename_keys,
    rsample as rsample,
    select as select,
    shuffle as shuffle,
    slice as slice,
    to_tuple as to_tuple,
    unbatched as unbatched,
    unlisted as unlisted,
    xdecode as xdecode,
)
from energon.webdataset.gopen import (
    gopen_schemes as gopen_schemes,
)
from energon.webdataset.handlers import (
    ignore_and_continue as ignore_and_continue,
    ignore_and_stop as ignore_and_stop,
    reraise_exception as reraise_exception,
    warn_and_continue as warn_and_continue,
    warn_and_stop as warn_and_stop,
)
from energon.webdataset.mix import (
    RandomMix as RandomMix,
    RoundRobin as RoundRobin,
    mixture as mixture,
)
from energon.webdataset.pipeline import (
    DataPipeline as DataPipeline,
)
from energon.webdataset.pytorch import (
    DataLoader as DataLoader,
    IterableDataset as IterableDataset,
    TorchTensor as TorchTensor,
)
from energon.webdataset.reading.urls import (
    expand_urls as expand_urls,
)
from energon.webdataset.records import (
    cbors2_to_samples as cbors2_to_samples,
    cbors_to_samples as cbors_to_samples,
    jsonl_to_samples as jsonl_to_samples,
    msgpacks_to_samples as msgpacks_to_samples,
)
from energon.webdataset.shardlists import (
    DirectoryShardList as DirectoryShardList,
    MultiShardSample as MultiShardSample,
    shardspec as shardspec,
    ResampledShardList as ResampledShardList,
    ResampledShards as ResampledShards,
    SimpleShardList as SimpleShardList,
    non_empty as non_empty,
    resampled as resampled,
    single_node_only as single_node_only,
    split_by_node as split_by_node,
    split_by_worker as split_by_worker,
)
from energon.webdataset.pipeline import (
    pipelinefilter as pipelinefilter,
    PipelineStage as PipelineStage,
)
from energon.webdataset.tariterators import (
    base_plus_ext as base_plus_ext,
    group_by_keys as group_by_keys,
    tar_file_expander as tar_file_expander,
    tar_file_iterator as tar_file_iterator,
    tarfile_samples as tarfile_samples,
    tarfile_to_samples as tarfile_to_samples,
    url_opener as url_opener,
    valid_sample as valid_sample,
)
from energon.webdataset.utils import (
    transform_with as transform_with,
    repeatedly as repeatedly,
)
from energon.webdataset.web_loader import (
    WebLoader as WebLoader,
)
from energon.webdataset.writer import (
    ShardWriter as ShardWriter,
    TarWriter as TarWriter,
    imageencoder as imageencoder,
    numpy_dumps as numpy_dumps,
    torch_dumps as torch_dumps,
)
from energon.webdataset.stages.batching import (
    default_collation_fn as default_collation_fn,
)
from energon.webdataset.stages.mapping import (
    getfirst as getfirst,
)
from energon.webdataset.stages.shuffling import (
    detshuffle as detshuffle,
)
from energon.webdataset.gopen import gopen as gopen

__version__: str
__all__: list[str]
