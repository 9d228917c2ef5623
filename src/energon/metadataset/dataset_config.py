"""Read `.nv-meta/dataset.yaml`: how the parts of one dataset become samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from energon.errors import ConfigError
from energon.formats.meta.yaml import MarkedMap, Seq, as_configuration, load, plain, where
from energon.io.address import join_address, redact
from energon.io.files import read_document
from energon.messages import nearest, shell_word
from energon.metadataset.leaf import Subset

CRUDE_CLASS = "CrudeWebdataset"
STANDARD_CLASS = "StandardWebdatasetFactory"
FLAVOR_CLASSES = tuple(
    f"{flavor}Webdataset"
    for flavor in (
        *("Captioning", "Image", "ImageClassification", "Interleaved", "MultiChoiceVQA", "OCR"),
        *("SimilarityInterleaved", "Text", "VidQA", "VQA", "VQAOCR"),
    )
)
"""Old class names that stand for a sample type: OCRWebdataset yields OCRSample."""
_CLASS_KEYS = ("__module__", "__class__")


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """The content of a `dataset.yaml`. The defaults are those of a dataset without one.

    Args:
        crude: Whether samples are left to cookers.
        dataset_class: Module and name of the program's own class that opens the dataset; None
            for those of energon. The class receives `arguments` and decides everything else.
        arguments: The remaining keys of the file, for that class.
        sample_type: Module and name of the class of samples; None if crude.
        field_map: For each field, the part that it is taken from.
        sample_loader: `file.py:function` that makes the fields from the parts.
        part_filter: Names of the parts to load, or `file.py:function` that chooses them.
        subflavors: The dataset's own subflavors, which all others override.
        split_config: File that lists the splits.
        split_part: The split.
        shuffle_over_epochs: See `Leaf.shuffle_over_epochs_multiplier`.
        parallel_shard_iters: Number of slices open at a time.
        max_samples_per_sequence: Longest slice; None for no limit.
        subset: The range of samples to use.
        decoder: Class and settings of the decoder, as written; None for no decoding.
        given: Names of the keys in the file. Only these override the arguments of a call.
        origin: The file.
    """

    crude: bool = True
    dataset_class: tuple[str, str] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sample_type: tuple[str, str] | None = None
    field_map: Mapping[str, str] | None = None
    sample_loader: str | None = None
    part_filter: str | tuple[str, ...] | None = None
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    split_config: str | None = None
    split_part: str | None = None
    shuffle_over_epochs: int | None = None
    parallel_shard_iters: int | None = None
    max_samples_per_sequence: int | None = None
    subset: Subset | None = None
    decoder: Mapping[str, Any] | None = None
    given: frozenset[str] = frozenset()
    origin: str = ""


def load_dataset_config(
    dataset_path: str | os.PathLike[str], name: str = "dataset.yaml"
) -> DatasetConfig:
    """Read `.nv-meta/<name>` of a dataset.

    Raises:
        ConfigError: If it is missing, not YAML, or invalid, naming every invalid place, or if the
            dataset is a file.
    """
    address = join_address(dataset_path, f".nv-meta/{name}")
    path = redact(address)
    try:
        with as_configuration():
            raw = load(read_document(address), origin=path, repeated_keys=True)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing; `energon prepare {shell_word(redact(dataset_path))}` writes one. "
            "To leave samples to cookers, write two lines: `__module__: megatron.energon` and "
            f"`__class__: {CRUDE_CLASS}`"
        ) from None
    except NotADirectoryError:
        raise ConfigError(
            f"{os.fspath(dataset_path)} is a file, expected the folder of a prepared dataset"
        ) from None
    named = _class_of_program(raw)
    if named is not None:
        arguments = {key: value for key, value in plain(raw).items() if key not in _CLASS_KEYS}
        return DatasetConfig(crude=False, dataset_class=named, arguments=arguments, origin=path)
    return _config(_check(raw, path), path)


def _class_of_program(raw: Any) -> tuple[str, str] | None:
    """Return module and name of the class that a document names, unless it is energon's."""
    if not isinstance(raw, Mapping):
        return None
    module, name = (raw.get(key) for key in _CLASS_KEYS)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    ours = module.removeprefix("megatron.").partition(".")[0] == "energon"
    return None if ours else (module, name)


def _check(raw: Any, path: str) -> MarkedMap:
    """Return the content of a valid `dataset.yaml`."""
    if not isinstance(raw, MarkedMap):
        problem = "is empty" if raw is None else "holds no mapping"
        raise ConfigError(f"{path}: {problem}; expected sample_type and field_map, or a __class__")
    if not _is_plain(raw):
        _check_grammar(raw)
    if problems := [*_contradictions(raw)]:
        raise ConfigError("\n".join(problems))
    return raw


def _check_grammar(raw: MarkedMap) -> None:
    """Raise ConfigError that names all keys and values that break the grammar."""
    from pydantic import ValidationError

    from energon.metadataset.grammar import DatasetDocument
    from energon.metadataset.problems import explain

    try:
        DatasetDocument.model_validate(raw)
    except ValidationError as exc:
        raise ConfigError(explain(exc, DatasetDocument, raw)) from exc


def _is_plain(raw: MarkedMap) -> bool:
    """Return whether the document obviously follows the grammar.

    Nearly all do, and the grammar takes a quarter of a second to import.
    """
    return all(key in _PLAIN and _PLAIN[key](value) for key, value in raw.items())


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_optional_text(value: Any) -> bool:
    return value is None or type(value) is str


def _is_optional_count(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 1)


def _has_text_keys(value: Any) -> bool:
    return isinstance(value, MarkedMap) and all(type(key) is str for key in value)


def _is_class(value: Any) -> bool:
    return (
        isinstance(value, MarkedMap)
        and value.keys() == set(_CLASS_KEYS)
        and all(map(_is_text, value.values()))
    )


_PLAIN: dict[str, Callable[[Any], bool]] = {
    "__module__": _is_text,
    "__class__": _is_text,
    "sample_type": _is_class,
    "field_map": lambda value: _has_text_keys(value) and all(map(_is_text, value.values())),
    "sample_loader": _is_text,
    "part_filter": lambda value: _is_text(value) or _is_texts(value),
    "subflavors": _has_text_keys,
    "split_config": _is_optional_text,
    "split_part": _is_optional_text,
    "shuffle_over_epochs": lambda value: value == -1 or _is_optional_count(value),
    "parallel_shard_iters": _is_optional_count,
    "max_samples_per_sequence": _is_optional_count,
    "decoder": lambda value: value is None or _has_text_keys(value),
}
"""Obviously valid values by key: fewer than `DatasetDocument` accepts."""


def _is_texts(value: Any) -> bool:
    return isinstance(value, Seq) and all(map(_is_text, value))


def _contradictions(document: MarkedMap) -> Iterator[str]:
    name = document.get("__class__") or STANDARD_CLASS
    if problem := _class_problem(document):
        yield f"{where(document, '__class__')}: {problem}"
        return
    typed = [key for key in ("sample_type", "field_map", "sample_loader") if key in document]
    if name == CRUDE_CLASS:
        for key in typed:
            yield f"{where(document, key)}: {CRUDE_CLASS} leaves samples to cookers, drop {key!r}"
        return
    if name in FLAVOR_CLASSES and "sample_type" in document:
        yield f"{where(document, 'sample_type')}: {name} names the sample type already"
    if name == STANDARD_CLASS and "sample_type" not in document:
        yield (
            f"{where(document)}: no sample_type; name one, or leave samples to cookers with "
            f"`__module__: megatron.energon` and `__class__: {CRUDE_CLASS}`"
        )
    yield from _loading_problems(document)


def _class_problem(document: MarkedMap) -> str | None:
    module, name = document.get("__module__"), document.get("__class__")
    if (module is None) != (name is None):
        return "__module__ and __class__ belong together, one is missing"
    classes = (CRUDE_CLASS, STANDARD_CLASS, *FLAVOR_CLASSES)
    # The modules that define the classes are named as well: megatron.energon.flavors.crude
    package = (module or "").removeprefix("megatron.").split(".")[0]
    if name is None or (package == "energon" and name in classes):
        return None
    close = nearest(name, classes)
    proposal = f", did you mean {close!r}?" if close else "."
    return (
        f"no dataset class {module}.{name}{proposal} Expected one of megatron.energon: "
        f"{', '.join(classes[:2])}, or a class that your program derives from one of these"
    )


def _loading_problems(document: MarkedMap) -> Iterator[str]:
    if "field_map" in document and "sample_loader" in document:
        yield f"{where(document, 'sample_loader')}: both field_map and sample_loader; keep one"
    elif "field_map" in document and "part_filter" in document:
        yield f"{where(document, 'part_filter')}: field_map selects the parts to load; drop this"
    elif "sample_loader" in document and "part_filter" not in document:
        yield f"{where(document, 'sample_loader')}: needs a part_filter: the names of the parts"
    elif not document.keys() & {"field_map", "sample_loader"}:
        yield f"{where(document)}: no field_map, like `field_map: {{image: jpg, caption: txt}}`"


def _config(document: MarkedMap, path: str) -> DatasetConfig:
    parts = document.get("part_filter")
    subset = document.get("subset")
    return DatasetConfig(
        crude=document.get("__class__") == CRUDE_CLASS,
        sample_type=_sample_type(document),
        field_map=plain(document.get("field_map")),
        sample_loader=document.get("sample_loader"),
        part_filter=tuple(parts) if isinstance(parts, list) else parts,
        subflavors=plain(document.get("subflavors", {})),
        split_config=document.get("split_config"),
        split_part=document.get("split_part"),
        shuffle_over_epochs=document.get("shuffle_over_epochs", 1),
        parallel_shard_iters=document.get("parallel_shard_iters"),
        max_samples_per_sequence=document.get("max_samples_per_sequence"),
        subset=None if subset is None else tuple(subset["range"]),
        decoder=plain(document.get("decoder")),
        given=frozenset(document).difference(_CLASS_KEYS),
        origin=path,
    )


def _sample_type(document: MarkedMap) -> tuple[str, str] | None:
    named = document.get("sample_type")
    if named is not None:
        return named["__module__"], named["__class__"]
    name = document.get("__class__")
    if name in FLAVOR_CLASSES:
        return str(document["__module__"]), str(name).replace("Webdataset", "Sample")
    return None
