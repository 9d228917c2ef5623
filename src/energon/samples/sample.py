"""The base classes of samples and batches, and the decorator for classes that derive from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Self, TypeVar, dataclass_transform, overload

from energon.samples.collate import generic_batch, map_tensors
from energon.samples.crude import basic_sample_keys
from energon.samples.display import META_FIELDS, SHORT
from energon.samples.provenance import SourceInfo, get_source_info

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


class _Subflavor:
    """The subflavor of a document of version 1, which is among the subflavors of a sample."""

    def __get__(self, owner: Sample | None, kind: type) -> str | None:
        if owner is None:  # a default of the class would be inherited by fields of this name
            raise AttributeError("__subflavor__")
        subflavor: str | None = (owner.__subflavors__ or {}).get("__subflavor__")
        return subflavor


@overload
def edataclass(cls: type[T]) -> type[T]: ...
@overload
def edataclass(cls: None = None) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(kw_only_default=True)
def edataclass(cls: type[T] | None = None) -> Any:
    """Make a class a dataclass for samples: fields by keyword only, kept in slots.

    Example:
        >>> from energon import Sample
        >>> @edataclass
        ... class Scored(Sample):
        ...     text: str
        ...     score: float = 0.0
        >>> Scored(__key__="a", text="yes").score
        0.0
    """

    def decorate(target: type[T]) -> type[T]:
        return dataclass(kw_only=True, slots=True)(target)

    return decorate if cls is None else decorate(cls)


class PinMemoryMixin:
    """Adds `pin_memory`, `to_device` and `to` to dataclasses with tensors.

    Objects may have attributes besides their fields, which hooks use to pass values on.
    """

    def pin_memory(self) -> Self:
        """Return a copy with its tensors in page-locked memory."""
        return map_tensors(self, lambda tensor: tensor.pin_memory())

    def to_device(self, device: torch.device | str, *, non_blocking: bool = True) -> Self:
        """Return a copy with its tensors on `device`.

        Args:
            device: The target device.
            non_blocking: Whether to return while page-locked tensors are still being copied.
        """
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return a copy with its tensors on `device`: `to_device` under the name trainers call."""
        return self.to_device(device, non_blocking=non_blocking)

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        # The decorator `dataclass` gives a class its own text unless it has one already.
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        if not is_dataclass(self):
            return super().__repr__()
        shown = (name for name in _field_names(self) if name not in META_FIELDS[1:])
        level = SHORT.maxlevel - 1
        values = (f"{name}={SHORT.repr1(getattr(self, name, None), level)}" for name in shown)
        return f"{type(self).__qualname__}({', '.join(values)})"

    def _repr_html_(self) -> str:
        """Return the fields as a table, for notebooks: images, shapes and sources."""
        from energon.samples.display import sample_html

        values = {name: getattr(self, name) for name in _field_names(self)}
        return sample_html(type(self).__name__, values)


@edataclass
class Sample(PinMemoryMixin):
    """Base class of the samples that datasets yield. Subclasses add fields with `edataclass`.

    Samples can be made from other samples of any type, and from dicts, such as crude samples.

    Example:
        >>> from energon import CaptioningSample, TextSample
        >>> sample = CaptioningSample(__key__="a", image=None, caption="a cat")
        >>> TextSample.derive_from(sample, text=sample.caption).__key__
        'a'
    """

    __key__: str
    """Names the sample within its dataset."""
    __restore_key__: tuple[Any, ...] = ()
    """Leaf, epoch and ordinal: where the plan has the sample."""
    __subflavors__: Mapping[str, Any] | None = None
    """The subflavors of the dataset and of the metadatasets above it."""
    __sources__: tuple[SourceInfo, ...] | None = None
    """The data that the sample was made from."""
    __subflavor__ = _Subflavor()

    @classmethod
    def derive_from(cls, base_sample: Any, **values: Any) -> Self:
        """Return a sample with the key, subflavors and sources of `base_sample`, and `values`."""
        return cls(**{**_meta(base_sample), **values})

    @classmethod
    def from_joined(cls, *samples: Any, **values: Any) -> Self:
        """Merge the fields of several samples; later ones win, and the first provides the key.

        None stands for a missing sample and adds nothing.
        """
        present = [sample for sample in samples if sample is not None]
        fields_by_name: dict[str, Any] = {}
        for sample in present:
            fields_by_name.update(_own_fields(sample))
        meta = _meta(present[0]) if present else {}
        sources = [source for sample in present for source in get_source_info(sample) or ()]
        return cls(**{**fields_by_name, **meta, "__sources__": tuple(sources), **values})

    @classmethod
    def extend(cls, src: Any, **values: Any) -> Self:
        """Return a sample with all fields of `src`, and `values` for the fields that it lacks."""
        return cls(**{**_meta(src), **_own_fields(src), **values})


@dataclass(kw_only=True)
class Batch(PinMemoryMixin):
    """Base class for batches whose fields hold one value per sample.

    Example:
        >>> from energon import TextSample
        >>> @edataclass
        ... class TextBatch(Batch):
        ...     text: list[str]
        >>> samples = [TextSample(__key__="a", text="one"), TextSample(__key__="b", text="two")]
        >>> batch = TextBatch.from_samples(samples)
        >>> batch.__key__, batch.text
        (['a', 'b'], ['one', 'two'])
    """

    # Without slots, and without attributes of the class: so `vars` has all fields of a batch, and
    # classes that declare a field again inherit no default.
    __key__: list[str]
    __restore_key__: tuple[Any, ...] = field(default_factory=tuple)
    __subflavors__: list[Mapping[str, Any] | None] | None = field(default_factory=NoneType)
    __sources__: tuple[SourceInfo, ...] | list[Any] | None = field(default_factory=NoneType)

    @classmethod
    def derive_from(cls, base_batch: Any, **values: Any) -> Self:
        """Return a batch with the keys, subflavors and sources of `base_batch`, and `values`."""
        return cls(**{**_meta(base_batch), **values})

    @classmethod
    def from_samples(cls, samples: Sequence[Any], **values: Any) -> Self:
        """Collate `samples`: tensors are stacked (and padded), other values become lists.

        Args:
            samples: At least one; fields that the batch class lacks are ignored.
            values: Fields to set as they are.
        """
        missing = {each.name for each in fields(cls)} - set(values)
        columns = {
            name: generic_batch([getattr(sample, name) for sample in samples])
            for name in _field_names(samples[0])
            if name in missing and not name.startswith("__")
        }
        meta: dict[str, Any] = {
            name: [getattr(sample, name) for sample in samples]
            for name in ("__key__", "__subflavors__")
        }
        meta["__restore_key__"] = tuple(sample.__restore_key__ for sample in samples)
        sources = [source for sample in samples for source in sample.__sources__ or ()]
        return cls(**{**meta, "__sources__": tuple(sources), **columns, **values})

    @classmethod
    def extend(cls, src: Any, **values: Any) -> Self:
        """Return a batch with all fields of `src`, and `values` for the fields that it lacks."""
        return cls(**{**_meta(src), **_own_fields(src), **values})


def _meta(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return basic_sample_keys(value)
    return {name: getattr(value, name) for name in META_FIELDS}


def _field_names(value: Any) -> list[str]:
    return [each.name for each in fields(value)]


def _own_fields(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: value[name] for name in value if not name.startswith("__")}
    return {name: getattr(value, name) for name in _field_names(value) if name not in META_FIELDS}
