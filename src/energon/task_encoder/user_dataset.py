"""Code stored with a dataset that makes its samples: `sample_loader.py`.

It runs only where the user allows it. Pipelines carry the text of the file to their workers, so
that all of them run what the user has allowed, whatever happens to the file.
"""

from __future__ import annotations

import hashlib
import posixpath
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from energon.allow import is_allowed, refusal
from energon.errors import ConfigError, SampleError
from energon.io.address import join_address, redact
from energon.io.files import read_text
from energon.messages import describe_error, type_in_words
from energon.metadataset.dataset_config import DatasetConfig
from energon.samples.field_map import SampleMaker, decoding_first, maker_of
from energon.sources.shard_samples import PartFilter


@dataclass(frozen=True)
class DatasetCode:
    """A function of a Python file.

    Args:
        origin: The file.
        text: What is in it.
        name: Name of the function.

    Raises:
        ConfigError: If there is no such function, or the file cannot be run.
    """

    origin: str
    text: str = field(repr=False)
    name: str

    def __post_init__(self) -> None:
        if not callable(getattr(self._module, self.name, None)):
            raise ConfigError(f"{self.origin}: has no function {self.name!r}")

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return getattr(self._module, self.name)(*arguments)

    @property
    def _module(self) -> ModuleType:
        return _run(self.origin, self.text)


@dataclass(frozen=True)
class CodeFields:
    """Makes the fields of a sample from its parts with a function.

    Args:
        loader: The function.
        sample_type: What the fields belong to.
        parts: Which parts it needs.
    """

    loader: Callable[[Any], Any]
    sample_type: type
    parts: Collection[str] | PartFilter

    def maker(self, sample_type: type, decoder: Callable[[Any], Any] | None = None) -> SampleMaker:
        """Return a function that makes a `sample_type` from parts, see `FieldMap.maker`."""
        return decoding_first(maker_of(self.apply, sample_type), decoder)

    def apply(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the fields.

        Raises:
            SampleError: If the function returns something else.
        """
        made = self.loader(parts)
        if not isinstance(made, Mapping):
            raise SampleError(
                f"{self.loader} returned {type_in_words(made)}, expected a dict of the fields "
                f"of {self.sample_type.__name__}"
            )
        if is_dataclass(self.sample_type):
            known = {own.name for own in fields(self.sample_type)}
            unknown = [name for name in made if name not in known]
            if unknown:
                raise SampleError(
                    f"{self.loader} returned {unknown[0]!r}, which is not a field of "
                    f"{self.sample_type.__name__}"
                )
        return dict(made)


def find_code(
    config: DatasetConfig, dataset: str, key: str, spec: str, allow: Collection[str]
) -> DatasetCode:
    """Return the function that a key of `dataset.yaml` names as `file.py:function`.

    Args:
        config: The description.
        dataset: Address of the dataset.
        key: The key, which is the name of the function if none is written.
        spec: What is written.
        allow: What the user allows.

    Raises:
        SecurityError: If it is not allowed.
        ConfigError: If there is no such file or function.
    """
    if not is_allowed("code", allow):
        raise refusal(
            "code", f"{config.origin}: {key} {spec!r} is code of the dataset, which is not run"
        )
    file, _, name = spec.partition(":")
    relative = posixpath.normpath(file)
    if posixpath.isabs(relative) or relative.startswith("..") or "://" in file:
        raise ConfigError(
            f"{config.origin}: {key} {spec!r} is not beside it; expected FILE.py:FUNCTION"
        )
    address = join_address(dataset, f".nv-meta/{relative}")
    try:
        text = read_text(address)
    except FileNotFoundError as error:
        raise ConfigError(f"{config.origin}: {key} {spec!r}: there is no {file}") from error
    return DatasetCode(redact(address), text, name or key)


@lru_cache(maxsize=64)
def _run(origin: str, text: str) -> ModuleType:
    """Return the file as a module; it runs once per process."""
    digest = hashlib.sha256(f"{origin}\0{text}".encode()).hexdigest()[:16]
    module = ModuleType(f"energon_dataset_code_{digest}")
    module.__file__ = origin
    # Dataclasses and pickle look for their module there.
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, origin, "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        raise ConfigError(f"{origin}: {describe_error(error)}") from error
    return module
