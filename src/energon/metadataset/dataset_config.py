"""Read `.nv-meta/dataset.yaml`: how the parts of one dataset become samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from energon.errors import ConfigError
from energon.formats.meta.yaml import load, plain
from energon.io.address import join_address, redact
from energon.io.files import read_document
from energon.metadataset.leaf import Subset
from energon.nearest import nearest

if TYPE_CHECKING:
    from energon.metadataset.dataset_grammar import DatasetDocument

CRUDE_CLASS = "CrudeWebdataset"
STANDARD_CLASS = "StandardWebdatasetFactory"
FLAVOR_CLASSES = tuple(
    f"{flavor}Webdataset"
    for flavor in (
        *("Captioning", "Image", "ImageClassification", "Interleaved", "MultiChoiceVQA", "OCR"),
        *("SimilarityInterleaved", "Text", "VidQA", "VQA", "VQAOCR"),
    )
)
"""Names of earlier times that stand for a sample type: OCRWebdataset yields OCRSample."""
_CLASS_KEYS = ("__module__", "__class__")


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """What a `dataset.yaml` says. Without arguments, what is said of a dataset that has none.

    Args:
        crude: Whether samples are left to cookers.
        dataset_class: Module and name of the class of the program that opens the dataset; None
            for those of energon. It gets `arguments`, and all else is its own business.
        arguments: What the file says beside the name of that class.
        sample_type: Module and name of their class; None if crude.
        field_map: For each field, the part that it is taken from.
        sample_loader: `file.py:function` that makes the fields of the parts.
        part_filter: Names of the parts to load, or `file.py:function` that chooses them.
        subflavors: Those of the dataset itself; all others go over them.
        split_config: File that lists the splits.
        split_part: Which split.
        shuffle_over_epochs: See `Leaf.shuffle_over_epochs_multiplier`.
        parallel_shard_iters: Slices that are open at a time.
        max_samples_per_sequence: Longest slice; None for no limit.
        subset: The range of samples to which the dataset is narrowed.
        decoder: Class and settings of the decoder, as written; None for no decoding.
        given: Names of the keys that the file has. Only these go over what a call says.
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
    """Return what `.nv-meta/<name>` of a dataset says.

    Raises:
        ConfigError: If it is missing or makes no sense, naming every place where it does not, or
            if the dataset is a file.
        FormatError: If it is not YAML.
    """
    address = join_address(dataset_path, f".nv-meta/{name}")
    path = redact(address)
    try:
        raw = load(read_document(address), origin=path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing; `energon prepare {redact(dataset_path)}` writes one. To leave "
            "samples to cookers, write two lines: `__module__: megatron.energon` and "
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
    return _config(_validate(raw, path), path)


def _class_of_program(raw: Any) -> tuple[str, str] | None:
    """Return module and name of the class that a document names, if it is none of energon."""
    if not isinstance(raw, Mapping):
        return None
    module, name = (raw.get(key) for key in _CLASS_KEYS)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    ours = module.removeprefix("megatron.").partition(".")[0] == "energon"
    return None if ours else (module, name)


def _validate(raw: Any, path: str) -> DatasetDocument:
    from pydantic import ValidationError

    from energon.metadataset.dataset_grammar import DatasetDocument
    from energon.metadataset.problems import explain

    if not isinstance(raw, Mapping):
        found = "is empty" if raw is None else "holds no mapping"
        raise ConfigError(f"{path}: {found}; expected sample_type and field_map, or a __class__")
    try:
        document = DatasetDocument.model_validate(raw)
    except ValidationError as exc:
        raise ConfigError(explain(exc, DatasetDocument, raw)) from exc
    if problems := [*_contradictions(document)]:
        raise ConfigError("\n".join(problems))
    return document


def _contradictions(document: DatasetDocument) -> Iterator[str]:
    given = document.model_fields_set
    name = document.class_ or STANDARD_CLASS
    if problem := _class_problem(document):
        yield f"{document.where('__class__')}: {problem}"
        return
    typed = [key for key in ("sample_type", "field_map", "sample_loader") if key in given]
    if name == CRUDE_CLASS:
        for key in typed:
            yield f"{document.where(key)}: {CRUDE_CLASS} leaves samples to cookers, drop {key!r}"
        return
    if name in FLAVOR_CLASSES and "sample_type" in given:
        yield f"{document.where('sample_type')}: {name} names the sample type already"
    if name == STANDARD_CLASS and "sample_type" not in given:
        yield (
            f"{document.where()}: no sample_type; name one, or leave samples to cookers with "
            f"`__module__: megatron.energon` and `__class__: {CRUDE_CLASS}`"
        )
    yield from _loading_problems(document, given)


def _class_problem(document: DatasetDocument) -> str | None:
    if (document.module is None) != (document.class_ is None):
        return "__module__ and __class__ belong together, one is missing"
    known = (CRUDE_CLASS, STANDARD_CLASS, *FLAVOR_CLASSES)
    name = document.class_
    # Modules that classes are at home in are named as well: megatron.energon.flavors.crude
    package = (document.module or "").removeprefix("megatron.").split(".")[0]
    if name is None or (package == "energon" and name in known):
        return None
    close = nearest(name, known)
    proposal = f", did you mean {close!r}?" if close else "."
    return (
        f"no dataset class {document.module}.{name}{proposal} Expected one of megatron.energon: "
        f"{', '.join(known[:2])}, or a class that your program derives from one of these"
    )


def _loading_problems(document: DatasetDocument, given: set[str]) -> Iterator[str]:
    if "field_map" in given and "sample_loader" in given:
        yield f"{document.where('sample_loader')}: both field_map and sample_loader; keep one"
    elif "field_map" in given and "part_filter" in given:
        yield f"{document.where('part_filter')}: field_map says which parts to load; drop this"
    elif "sample_loader" in given and "part_filter" not in given:
        yield f"{document.where('sample_loader')}: needs a part_filter: the names of the parts"
    elif not given & {"field_map", "sample_loader"}:
        yield f"{document.where()}: no field_map, like `field_map: {{image: jpg, caption: txt}}`"


def _config(document: DatasetDocument, path: str) -> DatasetConfig:
    parts = document.part_filter
    return DatasetConfig(
        crude=document.class_ == CRUDE_CLASS,
        sample_type=_sample_type(document),
        field_map=document.field_map,
        sample_loader=document.sample_loader,
        part_filter=tuple(parts) if isinstance(parts, list) else parts,
        subflavors=plain(document.subflavors),
        split_config=document.split_config,
        split_part=document.split_part,
        shuffle_over_epochs=document.shuffle_over_epochs,
        parallel_shard_iters=document.parallel_shard_iters,
        max_samples_per_sequence=document.max_samples_per_sequence,
        subset=document.subset.bounds if document.subset else None,
        decoder=plain(document.decoder),
        given=frozenset(document.model_fields_set - {"module", "class_"}),
        origin=path,
    )


def _sample_type(document: DatasetDocument) -> tuple[str, str] | None:
    if document.sample_type:
        return document.sample_type.module, document.sample_type.class_
    if document.class_ in FLAVOR_CLASSES:
        return str(document.module), document.class_.replace("Webdataset", "Sample")
    return None
