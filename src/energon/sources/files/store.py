"""Files by name: the contract of auxiliary data, and stores made of other stores."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from energon.errors import ConfigError, NoSuchFileError
from energon.io.range_file import LOCAL_BUFFER_BYTES, REMOTE_BUFFER_BYTES
from energon.samples.provenance import SourceInfo, add_source_info

if TYPE_CHECKING:
    from energon.formats.media import MediaMetadata


class OpensFiles(Protocol):
    """A store that opens files by name."""

    def open(self, name: str) -> IO[bytes]:
        """Return a file."""


class StoreFile(io.BufferedReader):
    """A file to read parts of. Pickled copies open it again, at its beginning.

    Args:
        file: The open file; ownership passes to this object.
        store: Opens it again elsewhere.
        name: Its name in the store.
        is_remote: Whether to fetch much at a time.
    """

    def __init__(
        self, file: io.BufferedReader, store: OpensFiles, name: str, *, is_remote: bool
    ) -> None:
        super().__init__(file.detach(), REMOTE_BUFFER_BYTES if is_remote else LOCAL_BUFFER_BYTES)
        self._store = store
        self._name = name

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _open, (self._store, self._name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r} of {self._store!r})"


def _open(store: OpensFiles, name: str) -> IO[bytes]:
    return store.open(name)


if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # A cooker that does not name the type of its stores gets files of Any.
    T_co = TypeVarWithDefault("T_co", covariant=True, default=Any)
else:
    T_co = TypeVar("T_co", covariant=True)


class FileStoreDecoder(Protocol):
    """Decodes the bytes of a file.

    Example:
        >>> class Upper:
        ...     def decode(self, fname: str, raw: bytes) -> str:
        ...         return raw.decode().upper()
    """

    def decode(self, fname: str, data: bytes) -> Any:
        """Return `data` decoded by the extension of `fname`."""


class FileStore(Generic[T_co]):
    """Returns files by name. Cookers receive one for each `aux` entry of a metadataset.

    Thread-safe, and can be pickled: copies reopen their files.

    Your own store needs `__getitem__`, which returns the content of a file and its origin;
    `get_raw` returns these, too, unless it is defined as well.

    Example:
        image = images.get("cats/17.jpg", sample)   # records its origin in the sample
    """

    def get_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        """Return the bytes of a file, and its origin.

        Raises:
            NoSuchFileError: If there is no file of that name.
        """
        if type(self).__getitem__ is FileStore.__getitem__:
            raise NotImplementedError(f"{type(self).__name__} has neither __getitem__ nor get_raw")
        return self[name]  # type: ignore[return-value]

    def get_path(self) -> str:
        """Return the location of the files, by which caches distinguish stores."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def get_many_raw(self, names: Sequence[str]) -> list[tuple[bytes, SourceInfo]]:
        """Return the result of `get_raw` for each of `names`, reading neighbors together."""
        return [self.get_raw(name) for name in names]

    def open(self, name: str) -> IO[bytes]:
        """Return a file object to read parts of, for example a few frames of a long video.

        Raises:
            NoSuchFileError: If there is no file of that name.
        """
        return io.BytesIO(self.get_raw(name)[0])

    def decode(self, name: str, data: bytes) -> T_co:
        """Return the decoded value of `data`, the bytes of file `name`."""
        return data  # type: ignore[return-value]

    def decoded_name(self, name: str, data: bytes) -> str:
        """Return the name whose extension tells decoders what the bytes of file `name` are."""
        return name

    def __getitem__(self, key: str) -> tuple[T_co, SourceInfo]:
        """Return a file and its origin."""
        data, source = self.get_raw(key)
        return self.decode(key, data), source

    def get(self, key: str, sample: Any = None) -> T_co:
        """Return a file.

        Args:
            key: Its name.
            sample: The file is added to its `__sources__`; None records it nowhere.

        Raises:
            NoSuchFileError: If there is no file of that name.
        """
        self._check_name(key)
        value, source = self[key]
        if sample is not None:
            add_source_info(sample, source)
        return value

    def get_many(self, names: Iterable[str], sample: Any = None) -> list[T_co]:
        """Return several files, in the order of `names`; see `get`.

        Cheaper than one after another: files that are close together are read at once.
        """
        names = list(names)
        for name in names:
            self._check_name(name)
        files = self.get_many_raw(names)
        values = [self.decode(name, data) for name, (data, _) in zip(names, files, strict=True)]
        if sample is not None:
            add_source_info(sample, *(source for _, source in files))
        return values

    def _check_name(self, name: object) -> None:
        # Names come from data, where they may be missing.
        if not isinstance(name, str):
            raise NoSuchFileError(
                f"{self.get_path()}: {name!r} is not a file name: expected text, found "
                f"{type(name).__name__}; check where the sample has the name, or raise SkipSample"
            )

    def get_size(self, name: str) -> int:
        """Return how many bytes a file has. Prepared datasets know it without reading it.

        Raises:
            NoSuchFileError: If there is no such file.
        """
        with self.open(name) as file:
            return file.seek(0, io.SEEK_END)

    def get_media_metadata(self, key: str) -> MediaMetadata:
        """Return size, duration and such of an image, audio or video file without reading it.

        Raises:
            ConfigError: If the dataset has no media metadata.
            NoSuchFileError: If it has none for this file.
        """
        raise ConfigError(
            f"{self.get_path()}: this kind of store has no media metadata; they come with prepared "
            "datasets and folders, see `energon prepare-media`"
        )

    def full_name(self, name: str) -> str:
        """Return the name of the file without reference to the requesting sample."""
        return name

    @property
    def identity(self) -> Hashable:
        """Equal for stores that return the same bytes for the same full name."""
        return type(self).__qualname__, self.get_path()

    @property
    def decoded_identity(self) -> Hashable:
        """Equal for stores that also decode a file to the same value."""
        return self.identity

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_path()!r})"


class _Wrapper(FileStore[T_co]):
    """A store that changes one thing about another."""

    def __init__(self, inner: FileStore[Any]) -> None:
        self.inner = inner

    def get_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        return self.inner.get_raw(name)

    def get_many_raw(self, names: Sequence[str]) -> list[tuple[bytes, SourceInfo]]:
        return self.inner.get_many_raw(names)

    def open(self, name: str) -> IO[bytes]:
        return self.inner.open(name)

    def get_path(self) -> str:
        return self.inner.get_path()

    def decode(self, name: str, data: bytes) -> T_co:
        return self.inner.decode(name, data)  # type: ignore[no-any-return]

    def get_size(self, name: str) -> int:
        return self.inner.get_size(name)

    def get_media_metadata(self, key: str) -> MediaMetadata:
        return self.inner.get_media_metadata(key)

    def full_name(self, name: str) -> str:
        return self.inner.full_name(name)

    @property
    def identity(self) -> Hashable:
        return self.inner.identity

    @property
    def decoded_identity(self) -> Hashable:
        return self.inner.decoded_identity


class DecodeFileStore(_Wrapper[Any]):
    """The files of another store, decoded.

    Args:
        inner: The store.
        decoder: Decodes the files, for instance a `SampleDecoder`.

    Example:
        >>> from pathlib import Path
        >>> from energon import SampleDecoder, SystemFileStore
        >>> _ = Path("notes.json").write_text('{"author": "Ada"}')
        >>> DecodeFileStore(SystemFileStore("."), decoder=SampleDecoder()).get("notes.json")
        {'author': 'Ada'}
    """

    def __init__(self, inner: FileStore[Any], *, decoder: FileStoreDecoder) -> None:
        super().__init__(inner)
        self.decoder = decoder
        self._decoder_identity: Hashable = None

    def decode(self, name: str, data: bytes) -> Any:
        return self.decoder.decode(self.inner.decoded_name(name, data), data)

    @property
    def decoded_identity(self) -> Hashable:
        if self._decoder_identity is None:
            self._decoder_identity = _content_of(self.decoder)
        return self.inner.identity, self._decoder_identity


def _content_of(decoder: FileStoreDecoder) -> Hashable:
    """Return a value that equivalent decoders have in common, also in other processes."""
    import cloudpickle

    try:
        content = cloudpickle.dumps(decoder)
    except Exception:  # what cannot be pickled is equal to nothing else
        content = f"{os.getpid()} {id(decoder)} {time.time_ns()}".encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class PrimaryFileStore(_Wrapper[T_co]):
    """The files of the dataset that a sample comes from, as seen from that sample.

    Names that begin with a dot are parts of the sample itself: for sample `0001`, ".jpg" is
    "0001.jpg".

    Args:
        inner: All files of the dataset.
        current_key: Key of the sample.

    Example:
        >>> from energon import Cooker, DefaultTaskEncoder, basic_sample_keys, cooker
        >>> @cooker(need_primary=True)
        ... def cook(sample: dict, primary: PrimaryFileStore) -> dict:
        ...     return {**basic_sample_keys(sample), "text": primary.get(".txt", sample)}
        >>> class Encoder(DefaultTaskEncoder):
        ...     cookers = (Cooker(cook),)
    """

    def __init__(self, inner: FileStore[T_co], current_key: str) -> None:
        super().__init__(inner)
        self.current_key = current_key

    def full_name(self, name: str) -> str:
        return self.inner.full_name(self.current_key + name if name.startswith(".") else name)

    def get_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        return self.inner.get_raw(self.full_name(name))

    def get_many_raw(self, names: Sequence[str]) -> list[tuple[bytes, SourceInfo]]:
        return self.inner.get_many_raw([self.full_name(name) for name in names])

    def open(self, name: str) -> IO[bytes]:
        return self.inner.open(self.full_name(name))

    def decode(self, name: str, data: bytes) -> T_co:
        return super().decode(self.full_name(name), data)

    def get_size(self, name: str) -> int:
        return self.inner.get_size(self.full_name(name))

    def get_media_metadata(self, key: str) -> MediaMetadata:
        return self.inner.get_media_metadata(self.full_name(key))
