"""What cookers get beside the sample: auxiliary data, the own dataset, the cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import GeneratorType
from typing import Any

from energon.cache.pool import active_pool
from energon.errors import ConfigError
from energon.samples.source_info import add_source_info, get_source_info
from energon.sources.files.store import (
    DecodeFileStore,
    FileStore,
    FileStoreDecoder,
    PrimaryFileStore,
)
from energon.task_encoder.cooker import Cooker

RESERVED = ("primary", "cache")


@dataclass(frozen=True)
class CookerArguments:
    """The keyword arguments of a cooker for the samples of one leaf.

    Args:
        stores: Auxiliary data, by the names in the metadataset.
        primary: All files of the leaf's dataset; None if the cooker does not want them.
        need_cache: Whether the cooker wants the cache pool.
    """

    stores: Mapping[str, FileStore[Any]] = field(default_factory=dict)
    primary: FileStore[Any] | None = None
    need_cache: bool = False

    def __bool__(self) -> bool:
        return bool(self.stores) or self.primary is not None or self.need_cache

    def __call__(self, key: str) -> dict[str, Any]:
        """Return the arguments for the sample of this key."""
        arguments: dict[str, Any] = dict(self.stores)
        if self.primary is not None:
            arguments["primary"] = PrimaryFileStore(self.primary, key)
        if self.need_cache:
            arguments["cache"] = active_pool()
        return arguments


def cooker_arguments(
    cooker: Cooker,
    *,
    aux: Mapping[str, FileStore[Any]],
    primary: Callable[[], FileStore[Any]] | None,
    decoder: FileStoreDecoder | None,
    dataset: str,
) -> CookerArguments:
    """Return what `cooker` gets for the samples of a dataset, its files decoded.

    Raises:
        ConfigError: If the cooker does not take what the metadataset and its marks give it.
    """
    if decoder is not None and getattr(decoder, "is_random", False):
        # Decoded files are cached, and several samples may ask for one.
        decoder = replace(decoder, random_resized_crop=False)  # type: ignore[type-var]
    wanted = [name for name in RESERVED if getattr(cooker, f"need_{name}")]
    for name in wanted:
        if name in aux:
            raise ConfigError(
                f"{dataset}: aux {name!r} has the name of what @cooker(need_{name}=True) gives; "
                "rename it in the metadataset"
            )
    _check_signature(cooker, [*aux, *wanted], dataset)
    if cooker.need_primary and primary is None:
        raise ConfigError(f"{dataset}: its files cannot be found by name, so need_primary fails")

    def decoded(store: FileStore[Any]) -> FileStore[Any]:
        return store if decoder is None else DecodeFileStore(store, decoder=decoder)

    return CookerArguments(
        stores={name: decoded(store) for name, store in aux.items()},
        primary=decoded(primary()) if primary is not None and cooker.need_primary else None,
        need_cache=cooker.need_cache,
    )


def _check_signature(cooker: Cooker, names: list[str], dataset: str) -> None:
    """Complain now about what would fail for every sample."""
    try:
        signature = inspect.signature(cooker.cook)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, **dict.fromkeys(names))
    except TypeError as error:
        name = getattr(cooker.cook, "__name__", repr(cooker.cook))
        given = ", ".join(names) or "nothing"
        raise ConfigError(
            f"{dataset}: cooker {name}{signature} is called with the sample and {given}: {error}. "
            "It gets an argument for each `aux` of the metadataset, and those that "
            "@cooker(need_primary=..., need_cache=...) asks for"
        ) from error


def note_sources(cooked: Any, crude: Any) -> Any:
    """Return what a cooker made of `crude`, with all that it has read from stores noted in it.

    Cookers take over the sources of the crude sample before they read from stores or after, as
    the arguments of a constructor happen to stand.
    """
    if type(cooked) is GeneratorType:
        return (note_sources(each, crude) for each in cooked)
    noted, all_of_them = get_source_info(cooked), get_source_info(crude)
    if noted and all_of_them and all_of_them[: len(noted)] == tuple(noted):
        add_source_info(cooked, *all_of_them[len(noted) :])
    return cooked
