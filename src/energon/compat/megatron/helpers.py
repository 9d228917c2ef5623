"""Small functions and types that programs import, and the core has no use for."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from enum import Enum, StrEnum
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar

from energon.compat.megatron.worker import note_ignored
from energon.decode.av_container import AV_EXTENSIONS, check_av_spec
from energon.errors import (
    SYSTEM_EXCEPTIONS,
    ConfigError,
    DatasetNotFoundError,
    FatalSampleError,
    SkipSample,
)
from energon.formats.meta import yaml
from energon.formats.meta.braces import collapse_braces
from energon.formats.meta.info import META, load_info
from energon.io import epath
from energon.io.address import split_address
from energon.io.epath import any_path
from energon.io.files import read_text
from energon.limits import is_allowed, refusal
from energon.messages import describe_error, type_in_words
from energon.metadataset.kind import dataset_kind
from energon.samples.crude import carries_key, stamp
from energon.samples.display import ShortText, short_text
from energon.samples.provenance import get_source_info
from energon.stages.hooks.failures import (
    DEFAULT_TOLERANCE,
    ErrorHandler,
    describe_sources,
    log_exception,
)
from energon.task_encoder.load import DatasetCode

if TYPE_CHECKING:
    from energon.decode.av import AVDecoder
    from energon.prepare.media import MediaFilter


class _AnyEPath(type):
    """Makes all paths of the core count as instances."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, epath.EPath)


class EPath(epath.EPath, metaclass=_AnyEPath):
    """The path of a file or folder on any store, see `energon.EPath`.

    Args:
        initial_path: A path or a URL.
        config_override: Settings of rclone cannot be passed: profiles are configured.
    """

    __slots__ = ()

    def __init__(
        self, initial_path: str | os.PathLike[str], config_override: dict[str, Any] | None = None
    ) -> None:
        if config_override is not None:
            raise ConfigError(
                "EPath(config_override=...) passes settings of an rclone remote, which are read "
                "from its configuration: use rclone://REMOTE/PATH"
            )
        super().__init__(initial_path)

    @property
    def display_name(self) -> str:
        """The last part of the path."""
        return self.name

    @property
    def internal_path(self) -> PurePosixPath:
        """The path within its store."""
        address = self.url if self.is_local() else split_address(self.url).key
        return PurePosixPath("/", address)

    @property
    def protocol(self) -> str:
        """The scheme of the URL; `local` for paths on this machine."""
        return "local" if self.is_local() else self.url.partition("://")[0]

    def fork_guard(self) -> None:
        """Do nothing: connections do not belong to paths."""

    @staticmethod
    def prepare_forked_process() -> None:
        """Do nothing: workers open their own connections."""


NVDATASET_CACHE_DIR: EPath | Path | None = None
"""May be set by programs, and has no effect: docs/storage.md says where energon keeps files."""


T = TypeVar("T")

AVDecoderType = Literal["torch", "AVDecoder", "pyav"]
"""What audio and video may become."""

ImageDecoderType = Literal[
    "l8", "rgb8", "rgba8", "l", "rgb", "rgba",
    "torchl8", "torchrgb8", "torchrgba8", "torchl", "torchrgb", "torch", "torchrgba",
    "pill", "pil", "pilrgb", "pilrgba",
]  # fmt: skip
"""What images may become."""


def dataclass_slots(cls: type[T]) -> type[T]:
    """Make a class a dataclass with slots."""
    return dataclass(slots=True)(cls)


def load_yaml(stream: bytes | str | IO[Any]) -> Any:
    """Return the content of a YAML document.

    Args:
        stream: The document, or a file open for reading.
    """
    text = stream if isinstance(stream, bytes | str) else stream.read()
    document = text.decode() if isinstance(text, bytes) else text
    return yaml.plain(yaml.load(document, origin=str(getattr(stream, "name", "document"))))


def get_stateless(fn: Callable[..., Any]) -> bool:
    """Return whether `stateless` has marked a hook."""
    return bool(getattr(fn, "__stateless__", False))


def get_failure_tolerance(
    fn: Callable[..., Any], default_failure_tolerance: int | None = None
) -> int | None:
    """Return how many consecutive failures of a hook are tolerated, or the default."""
    tolerance = getattr(fn, "__failure_tolerance__", None)
    return default_failure_tolerance if tolerance is None else tolerance


def get_cooker_need_cache(fn: Callable[..., Any]) -> bool:
    """Return whether a cooker needs the cache."""
    return bool(getattr(fn, "__need_cache__", False))


def get_cooker_need_primary(fn: Callable[..., Any]) -> bool:
    """Return whether a cooker needs the files of its dataset by name."""
    return bool(getattr(fn, "__need_primary__", False))


def set_sample_restore_key(
    sample: T, *key: Any, src: Any = None, fail_otherwise: bool = False
) -> T:
    """Attach a restore key to a sample, and return the sample.

    Args:
        sample: The sample.
        key: The parts of the key.
        src: Has no effect.
        fail_otherwise: Whether to raise if it is of a type that cannot carry one.

    Raises:
        ConfigError: See `fail_otherwise`.
    """
    _check_carries(sample, fail_otherwise)
    stamp(sample, key)
    return sample


def add_sample_restore_key(
    sample: T, *key: Any, src: Any = None, fail_otherwise: bool = False
) -> T:
    """Prepend to the restore key of a sample; arguments as in `set_sample_restore_key`."""
    _check_carries(sample, fail_otherwise)
    stamp(sample, (*key, *(get_sample_restore_key(sample) or ())))
    return sample


def get_sample_restore_key(sample: Any) -> Any:
    """Return the restore key of a sample; None if it has none."""
    if isinstance(sample, dict):
        return sample.get("__restore_key__")
    return getattr(sample, "__restore_key__", None)


def _check_carries(sample: Any, fail: bool) -> None:
    if fail and not carries_key(sample):
        raise ConfigError(
            f"{type_in_words(sample)} carries no restore key; derive it from Sample, or give it "
            "the attribute __restore_key__"
        )


def format_sample_compact(
    sample: Any, depth: int = 2, max_items: int = 10, max_str_len: int = 50
) -> str:
    """Return a sample as one line, with types and shapes of large values.

    Args:
        sample: The sample.
        depth: Maximum depth of containers to show.
        max_items: Maximum number of elements of a container to show.
        max_str_len: Maximum number of characters of a text to show.
    """
    text = ShortText()
    text.maxlevel = depth
    text.maxdict = text.maxlist = text.maxtuple = text.maxset = max_items
    text.maxstring = text.maxother = max_str_len
    return text.repr(vars(sample) if is_dataclass(sample) else sample)


def format_sample_detailed(sample: Any, indent: int = 2) -> str:
    """Return a sample as lines, one for each field, indented by this many spaces."""
    fields = vars(sample) if is_dataclass(sample) else sample
    if not isinstance(fields, dict):
        return " " * indent + short_text(fields)
    return "\n".join(f"{' ' * indent}- {name}: {short_text(fields[name])}" for name in fields)


def warn_deprecated(reason: str, stacklevel: int = 2) -> None:
    """Warn about a deprecation, at the call that is `stacklevel` levels up."""
    warnings.warn(reason, FutureWarning, stacklevel=stacklevel + 1)


class ModuleLoader:
    """Runs Python files, which must be allowed: ENERGON_ALLOW=code.

    Args:
        allow: What is allowed, see `get_train_dataset`.
    """

    def __init__(self, allow: Collection[str] = ()) -> None:
        self.allow = allow

    def get_function(
        self,
        module_fn: str,
        default_fn_name: str | None = None,
        relative_path: str | EPath | Path | None = None,
    ) -> Callable[..., Any]:
        """Return a function of a Python file.

        Args:
            module_fn: `FILE.py:FUNCTION`.
            default_fn_name: The function, if only a file is named.
            relative_path: The folder of the file; None for the working directory.

        Raises:
            ConfigError: If there is no such function.
            SecurityError: If code is not allowed.
        """
        file, _, name = module_fn.partition(":") if "://" not in module_fn else (module_fn, "", "")
        name = name or default_fn_name or ""
        if not name:
            raise ConfigError(f"{module_fn!r}: name a function, as FILE.py:FUNCTION")
        path = EPath(file) if relative_path is None else EPath(relative_path) / file
        if not is_allowed("code", self.allow):
            raise refusal("code", f"{path} is code of a dataset, which is not run")
        return DatasetCode(str(path), read_text(path), name)


def collapse(strings: Iterable[str], keep_order: bool = True) -> list[str]:
    """Return names as patterns in braces, like `shard_{000..117}.tar`.

    Args:
        strings: The names.
        keep_order: Whether the patterns have the names in the same order, or sorted.

    Example:
        >>> collapse(["a_08.tar", "a_09.tar", "a_10.tar", "b.tar"])
        ['a_{08..10}.tar', 'b.tar']
    """
    return collapse_braces(list(strings) if keep_order else sorted(strings))


MAIN_FOLDER_NAME = META
INDEX_SQLITE_FILENAME = "index.sqlite"
INDEX_UUID_FILENAME = "index.uuid"
INFO_JSON_FILENAME = ".info.json"
INFO_YAML_FILENAME = ".info.yaml"
SPLIT_YAML_FILENAME = "split.yaml"


class ErrorContext:
    """Passes failures to a handler, until there are too many of them in a row.

    Args:
        name: Name of the operation in messages.
        handler: Called as `handler(exception, sample, sources)` for each tolerated failure.
        tolerance: Number of consecutive failures that ends the run; 0 for no limit.

    Example:
        >>> context = ErrorContext("parse", lambda error, sample, sources: print(error))
        >>> for text in ("1", "one"):
        ...     with context.handle_errors(text):
        ...         print(int(text))
        1
        invalid literal for int() with base 10: 'one'
    """

    def __init__(
        self, name: str, handler: ErrorHandler = log_exception, tolerance: int = DEFAULT_TOLERANCE
    ) -> None:
        self.name = name
        self.handler = handler
        self.tolerance = tolerance
        self._failed_in_a_row = 0

    def reset(self) -> None:
        """Forget the failures so far."""
        self._failed_in_a_row = 0

    @contextmanager
    def handle_errors(self, sample: Any) -> Iterator[None]:
        """Tolerate errors in the block for `sample`; `SkipSample` does not count as a failure.

        Raises:
            FatalSampleError: If the tolerance is exceeded, or the error is always fatal.
        """
        try:
            yield
        except SkipSample:
            return
        except SYSTEM_EXCEPTIONS as error:
            raise FatalSampleError(f"{self._where(sample)}: {describe_error(error)}") from error
        except Exception as error:
            self._failed_in_a_row += 1
            if self.tolerance and self._failed_in_a_row >= self.tolerance:
                raise FatalSampleError(
                    f"{self._where(sample)}: {describe_error(error)}; that makes "
                    f"{self._failed_in_a_row} failures in a row, which is the limit"
                ) from error
            self.handler(error, sample, get_source_info(sample))
        else:
            self.reset()

    def _where(self, sample: Any) -> str:
        return f"{self.name} failed on {describe_sources(get_source_info(sample))}"


@contextmanager
def handle_restore_errors(error_handler: ErrorHandler, sample: Any) -> Iterator[None]:
    """Pass errors in the block to `error_handler`.

    Raises:
        FatalSampleError: If the error is always fatal.
    """
    try:
        yield
    except SYSTEM_EXCEPTIONS as error:
        where = describe_sources(get_source_info(sample))
        raise FatalSampleError(f"{where}: {describe_error(error)}") from error
    except Exception as error:
        error_handler(error, sample, get_source_info(sample))


@dataclass(frozen=True)
class AVWebdatasetDecoder:
    """Decodes parts with audio or video to the form `av_decode`. Call it with name and bytes.

    Args:
        video_decode_audio: Whether "torch" decodes the audio of videos too.
        av_decode: "AVDecoder" for a decoder of clips on request; "torch" for all frames as
            `AVData`; "pyav" for a container of PyAV.

    Raises:
        ConfigError: If `av_decode` is unknown.
    """

    video_decode_audio: bool
    av_decode: AVDecoderType = "AVDecoder"

    def __post_init__(self) -> None:
        check_av_spec(self.av_decode)

    def read_av_data(self, data: bytes) -> AVDecoder:
        """Return a decoder for the content of a file."""
        from energon.decode.av import AVDecoder

        return AVDecoder(io.BytesIO(data))

    def __call__(self, key: str, data: bytes) -> Any:
        """Return the decoded `data`; None if the name is not that of audio or video.

        Raises:
            DecodeError: If the form is "torch" or "pyav" and the file is damaged.
        """
        if key.rpartition(".")[2].lower() not in AV_EXTENSIONS:
            return None
        from energon.decode.av import decode_av

        return decode_av(data, self.av_decode, with_audio=self.video_decode_audio)


class EnergonDatasetType(Enum):
    """The type of a dataset."""

    METADATASET = "metadataset"
    WEBDATASET = "webdataset"
    JSONL = "jsonl"
    FILESYSTEM = "filesystem"
    INVALID = "invalid"


def get_dataset_type(path: str | os.PathLike[str]) -> EnergonDatasetType:
    """Return the type of the dataset at `path`; INVALID if it cannot be loaded."""
    try:
        return EnergonDatasetType(dataset_kind(path))
    except (DatasetNotFoundError, ValueError):
        return EnergonDatasetType.INVALID


def check_dataset_info_present(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a prepared dataset of shards at `path`."""
    return get_dataset_type(path) is EnergonDatasetType.WEBDATASET


def get_dataset_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of `.nv-meta/.info.json` of a dataset.

    Raises:
        DatasetNotFoundError: If there is no prepared dataset.
    """
    info = load_info(epath.EPath(path))
    return {"energon_version": info.energon_version, "shard_counts": dict(info.shard_counts)}


class MediaFilterStrategy(StrEnum):
    """How media files are recognized."""

    EXTENSION = "EXTENSION"
    HEADER = "HEADER"
    GLOB = "GLOB"


@dataclass(frozen=True)
class MediaFilterConfig:
    """Which files are checked for media metadata.

    Args:
        strategy: How they are recognized.
        patterns: For GLOB: patterns for their names.
    """

    strategy: MediaFilterStrategy
    patterns: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, glob: str | None, header: bool, extension: bool) -> MediaFilterConfig:
        """Return the configuration for options of a command, one of which must be set."""
        if sum(map(bool, (glob, header, extension))) != 1:
            raise ValueError("exactly one of glob, header and extension has to be set")
        if glob:
            return cls(MediaFilterStrategy.GLOB, [each.strip() for each in glob.split(",")])
        return cls(MediaFilterStrategy.HEADER if header else MediaFilterStrategy.EXTENSION)


INDEX_PLACE = "indexes are written where they belong"


def prepare_filesystem_dataset(
    root_path: str | os.PathLike[str],
    media_filter: MediaFilter | MediaFilterConfig,
    *,
    progress: Any = None,
    workers: int = 16,
    index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
) -> int:
    """Store the metadata of the media files of a folder.

    Args:
        root_path: The folder, local or in an object store.
        media_filter: Selects the files.
        progress: Shows the progress if it is a function, see `prepare_dataset`; True has no
            effect, as is logged once.
        workers: Number of processes that read shards or files.
        index_sqlite_tmp_path: Has no effect, as is logged once.

    Returns:
        Number of files with metadata.
    """
    # Programs that import something else from here start without it.
    from energon.prepare.engines import Engine
    from energon.prepare.media import MediaFilter, prepare_media, prepare_remote_media

    note_ignored("files are not counted in advance", progress=progress is True)
    note_ignored(INDEX_PLACE, index_sqlite_tmp_path=index_sqlite_tmp_path is not None)
    folder, shown = any_path(root_path), ShownProgress(progress if callable(progress) else None)
    kept = media_filter
    if isinstance(kept, MediaFilterConfig):
        kept = MediaFilter(kept.strategy.value, ",".join(kept.patterns) or None)
    if isinstance(folder, epath.EPath):
        report = prepare_remote_media(folder.url, kept, num_workers=workers, progress=shown)
    else:
        report = prepare_media(folder, kept, engine=Engine(num_workers=workers), progress=shown)
    return report.stored


ProgressBar = Callable[[Iterator[Any], int], Iterator[Any]]
"""Wraps an iterator to show its progress; called with the iterator and its length."""


class ShownProgress:
    """Advances a progress bar to a number of finished shards."""

    def __init__(self, show: ProgressBar | None) -> None:
        self.show = show
        self.bar: Iterator[Any] | None = None
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        if self.show is None:
            return
        if self.bar is None:
            self.bar = iter(self.show(iter(range(total)), total))
        # The bar finishes only when it is asked for one item more than there are.
        for _ in range(done - self.done + (done == total)):
            next(self.bar, None)
        self.done = done
