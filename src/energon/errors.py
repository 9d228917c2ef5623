"""Exceptions: every one that energon raises on purpose.

EnergonError
├── ConfigError (ValueError)            an argument or a YAML document is invalid
│   ├── UnknownArgumentError (TypeError) … there is no argument of that name
│   ├── EmptyDatasetError               a dataset, split or subset holds no samples
│   └── MissingExtraError (ImportError) a feature needs a package that is not installed
├── FormatError (ValueError)            bytes on disk are not what their format says
│   ├── TruncatedError (EOFError)       … because the end is missing
│   ├── ShardChangedError               … because a shard was changed after it was indexed
│   └── DuplicateSampleKeyError         two samples of a dataset have the same key
├── DatasetNotFoundError (FileNotFoundError)  a shard, dataset or document is missing
├── StorageError (OSError)              a store could not be read or written
│   ├── StorageAccessError (PermissionError)  … because it refuses these credentials
│   ├── StorageTimeoutError (TimeoutError)    … within the time it was given
│   ├── StorageFullError                … because a disk is full
│   ├── RangesNotSupportedError         … because it serves whole objects only
│   └── ObjectChangedError              … because the object was replaced in the meantime
├── DatasetBusyError (BlockingIOError)  another process is writing the dataset
├── SecurityError (PermissionError, ValueError)  refused unless the user allows it by name
├── StateError (ValueError)             a saved state does not match
├── SampleError (ValueError)            a hook or decoder failed on a sample
│   ├── DecodeError                     … the bytes of a part cannot be decoded
│   ├── FieldAccessError (LookupError)  … a field map does not resolve
│   ├── NoSuchFileError (FileNotFoundError, KeyError)  … it names a file that a store lacks
│   └── FatalSampleError                … and the run ends because of it
└── WorkerError (RuntimeError)          a loader worker died, hung or could not start
    └── WorkerTimeoutError (TimeoutError)  … it made no progress in time

SkipSample (Exception)                  raised by user hooks to drop a sample; not an error

`needs_extra` raises MissingExtraError where a package is imported that only some features need,
`check_at_least` raises ConfigError where an argument should be a number of something.
"""

from __future__ import annotations

from operator import index
from typing import Any, Self

from energon.messages import describe_error, escape_text, redact_text


class EnergonError(Exception):
    """Base of all errors that energon raises deliberately.

    Messages name what is in data, so what terminals would obey is escaped in them, and addresses
    lose their passwords.
    """

    def __str__(self) -> str:
        return escape_text(redact_text(super().__str__()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class ConfigError(EnergonError, ValueError):
    """An argument or a document is invalid."""


class UnknownArgumentError(ConfigError, TypeError):
    """A function was called with an argument that it does not have."""


class EmptyDatasetError(ConfigError):
    """A dataset, split or subset has no samples."""


class MissingExtraError(ConfigError, ImportError):
    """A feature needs a package that is not installed; the message names the extra."""


class FormatError(EnergonError, ValueError):
    """A file violates its format."""


class TruncatedError(FormatError, EOFError):
    """A file ends before its content does."""


class ShardChangedError(FormatError):
    """A shard is not the file that was indexed."""


class DuplicateSampleKeyError(FormatError):
    """Two samples of one dataset have the same key."""


class DatasetNotFoundError(EnergonError, FileNotFoundError):
    """A shard, a dataset or a document is missing."""


class StorageError(EnergonError, OSError):
    """A store could not be read or written. The message names no credentials.

    Args:
        message: What happened where.
        transient: Whether the same request may well succeed when it is made again.
        unreachable: Whether there is no such host, or nothing that listens there.
    """

    def __init__(self, message: str, *, transient: bool = False, unreachable: bool = False) -> None:
        super().__init__(message)
        self.transient = transient
        self.unreachable = unreachable


class StorageAccessError(StorageError, PermissionError):
    """A store refuses the credentials, or requires some."""


class StorageTimeoutError(StorageError, TimeoutError):
    """A store did not answer in time, despite all retries."""


class StorageFullError(StorageError):
    """A disk is full, or a file may not become that large."""


class RangesNotSupportedError(StorageError):
    """The server only serves whole objects, not ranges."""


class ObjectChangedError(StorageError):
    """An object is no longer the version that was opened."""


class DatasetBusyError(EnergonError, BlockingIOError):
    """Another process is writing the dataset."""


class SecurityError(EnergonError, PermissionError, ValueError):
    """Refused unless the user allows it by name, see `ENERGON_ALLOW`."""


class StateError(EnergonError, ValueError):
    """A saved state does not match the loader that restores it."""


class SampleError(EnergonError, ValueError):
    """A hook or a decoder failed on a sample."""

    @classmethod
    def from_sample_key(cls, sample_key: object, message: str = "") -> Self:
        """Return the error that says that the sample of this key failed, and why."""
        return cls(f"sample {sample_key!r:.80} failed" + (f": {message}" if message else ""))

    @classmethod
    def from_sample(cls, sample: object, message: str = "") -> Self:
        """Return the error that says that `sample` failed, by its key if it has one, and why.

        Example:
            >>> SampleError.from_sample({"__key__": "a_00350"}, "no caption")
            SampleError("sample 'a_00350' failed: no caption")
        """
        if isinstance(sample, dict):
            key = sample.get("__key__")
        else:
            key = getattr(sample, "__key__", None)
        return cls.from_sample_key(sample if key is None else key, message)


class DecodeError(SampleError):
    """The bytes of a part cannot be decoded."""


class FieldAccessError(SampleError, LookupError):
    """A field map names a part or key that the sample does not have."""


class NoSuchFileError(SampleError, FileNotFoundError, KeyError):
    """A sample names a file that its store does not have."""

    # KeyError would print its message in quotes.
    def __str__(self) -> str:
        return escape_text(redact_text(Exception.__str__(self)))


class FatalSampleError(SampleError):
    """A failure that ends the run, whatever the tolerance."""


class WorkerError(EnergonError, RuntimeError):
    """A loader worker died, hung or could not be started."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A batch took too long where nothing can be replaced: in the training process."""


class SkipSample(Exception):
    """Raise in a hook to drop the current sample silently.

    Example:
        >>> from energon import DefaultTaskEncoder
        >>> class Encoder(DefaultTaskEncoder):
        ...     def encode_sample(self, sample):
        ...         if not sample.caption:
        ...             raise SkipSample("it has no caption")
        ...         return sample
    """


SYSTEM_EXCEPTIONS: tuple[type[BaseException], ...] = (
    SystemError,
    SyntaxError,
    ImportError,
    StopIteration,
    StopAsyncIteration,
    RecursionError,
    ReferenceError,
    NameError,
    FatalSampleError,
)
"""Raised in a hook, these end the run: they are faults of the program, not of one sample."""


class needs_extra:
    """Raise MissingExtraError for imports in the block that fail, with the extra to install.

        with needs_extra("formats", "CBOR needs cbor2"):
            import cbor2

    Args:
        extra: The extra that brings the package.
        reason: What needs which package.
    """

    def __init__(self, extra: str, reason: str) -> None:
        self._extra = extra
        self._reason = reason

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, *_: object) -> None:
        if isinstance(error, ImportError):
            raise MissingExtraError(
                f"{self._reason}; pip install 'energon-loader[{self._extra}]'"
            ) from error


def reason_of(error: BaseException) -> str:
    """Return the message of an error of ours, or the type and message of any other."""
    return str(error) if isinstance(error, EnergonError) else describe_error(error)


def is_whole(value: Any) -> bool:
    """Return whether an argument is a whole number; True and False are none.

    Example:
        >>> is_whole(2), is_whole(True), is_whole(2.0), is_whole("2")
        (True, False, False, False)
    """
    try:
        index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def check_at_least(least: int, name: str, value: Any) -> None:
    """Raise ConfigError unless an argument is a whole number that is large enough."""
    if not is_whole(value):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value!r}")
