"""Generate the API reference of the site from signatures and docstrings, a page per group."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

HEAD = """\
# API reference

Every public name. Import the names from `energon`, unless the heading names another module;
`help(energon.ShardWriter)` shows the same text in Python. [Command line](../command_line.md)
lists everyday commands, settings and methods.
"""

MADE_BY_GETTERS = {"Recipe", "SavableDataset", "SavableDataLoader", "BasicDataLoader"}
"""Classes whose instances come from getters and loaders."""

WRAPPERS = (
    "MapDataset FilterDataset IterMapDataset BatchDataset GroupBatchDataset MixBatchDataset "
    "PackingDataset BlendDataset ConcatDataset RepeatDataset ShuffleBufferDataset LimitDataset "
    "EpochizeDataset LogSampleDataset GcDataset WatchdogDataset"
)

FOR_USERS = {
    "SavableDataset": {"config", "restore_sample"},
    **{name: {"config", "len_rank", "restore_sample"} for name in WRAPPERS.split()},
}
"""Of these classes, what is not for loaders and stages only."""

GROUPS: dict[str, tuple[str, str]] = {
    "Datasets and loaders": (
        "energon",
        "get_train_dataset get_val_dataset get_val_datasets get_savable_loader get_loader loop "
        "save_rank_file load_rank_files WorkerConfig SavableDataset BasicDataLoader "
        "SavableDataLoader Balance PlannedPacks ContextParallel RayWorkers",
    ),
    "Monitoring": ("energon", "export_to_prometheus export_to_opentelemetry"),
    "Task encoders": (
        "energon",
        "TaskEncoder DefaultTaskEncoder Recipe stateless Cooker cooker SampleDecoder "
        "RandomResizedCrop SkipSample Quarantine log_exception reraise_exception",
    ),
    "Samples and batches": (
        "energon",
        "Sample Batch edataclass short_text CrudeSample basic_sample_keys SourceInfo "
        "CaptioningSample ImageClassificationSample ImageSample InterleavedSample "
        "MultiChoiceVQASample OCRSample "
        "SimilarityInterleavedSample TextSample TokensSample VQAOCRSample VQASample VidQASample "
        "generic_batch batch_list batch_pad_stack batch_stack concat_pad generic_concat "
        "homogeneous_concat_mix",
    ),
    "Packing (`energon.packing`)": (
        "energon.packing",
        "Packer Selection pack_sequences PackedSequence cu_seqlens merge_cu_seqlens position_ids "
        "chat_messages chat_tokens ChatTokens image_tokens fill_exactly first_fit_decreasing "
        "greedy_knapsack",
    ),
    "Preparing datasets, metadatasets": (
        "energon",
        "prepare_dataset prepare_jsonl prepare_metadataset traverse_metadataset",
    ),
    "Writing and storage": ("energon", "ShardWriter TarWriter EPath"),
    "Auxiliary data and caches": (
        "energon",
        "FileStore SystemFileStore open_file_store DecodeFileStore PrimaryFileStore "
        "FileStoreDecoder CachePool FileStoreCachePool NoCachePool Lazy DirectLazy FileCacheLazy "
        "MockLazy",
    ),
    "Audio and video": (
        "energon",
        "AVDecoder AVData AVMetadata ImageMetadata get_clips_uniform get_single_frames_uniform",
    ),
    "Task encoders, datasets and wrappers of `megatron.energon`": (
        "megatron.energon",
        f"AugmentTaskEncoder load_dataset DatasetLoader LoadedDataset LoadedDatasetList {WRAPPERS}",
    ),
    "Geometric transforms (`energon.transforms`)": (
        "energon.transforms",
        "MergeTransform CustomTransform TransformMapper ResizeMapper RandomResizedCropMapper "
        "RandomCropMapper CenterCropMapper RandomHorizontalFlipMapper RandomVerticalFlipMapper "
        "RandomPerspectiveMapper RandomRotationMapper",
    ),
    "Errors": (
        "energon.errors",
        "EnergonError ConfigError UnknownArgumentError EmptyDatasetError MissingExtraError "
        "FormatError TruncatedError ShardChangedError DuplicateSampleKeyError DatasetNotFoundError "
        "StorageError StorageAccessError StorageTimeoutError StorageFullError "
        "RangesNotSupportedError ObjectChangedError DatasetBusyError SecurityError StateError "
        "SampleError DecodeError FieldAccessError NoSuchFileError FatalSampleError WorkerError "
        "WorkerTimeoutError",
    ),
}

STREAMS = "energon.webdataset"
OF_ALL_STAGES = {"describe", "invoke", "is_random", "open", "run"}
STREAM_GROUPS = {
    "Pipelines": "compat pipeline mix dataset_spec extradatasets web_loader utils",
    "Sources": "shardlists reading tariterators records gopen cache",
    "Stages": "filters stages handlers autodecode",
    "Writers": "writer writing",
}
"""The modules that define the names of `energon.webdataset`, by what the names are for."""

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Example|Examples):\s*$")
_ENTRY = re.compile(r"(\S[^:]*): (.*)")


def overview() -> str:
    """Return the first page of the reference: the names of each group, as links."""
    parts = [HEAD]
    for title, (_, names) in GROUPS.items():
        parts.append(_links(title, names.split()))
    parts += [_links(title, [*entries]) for title, entries in _streams().items()]
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """Return the pages of the site by name, in the order of the groups."""
    found = {}
    for title, (module, names) in GROUPS.items():
        members = import_module(module)
        found[title] = [describe(name, getattr(members, name), module) for name in names.split()]
    about = (
        "Arguments are those of webdataset; [WebDataset streams](../webdataset.md) shows more.\n"
    )
    for title, entries in _streams().items():
        found[title] = [about, *entries.values()]
    return {_slug(title): "\n".join([f"# {title}\n", *each]) for title, each in found.items()}


def _links(title: str, names: list[str]) -> str:
    page = f"{_slug(title)}.md"
    entries = ", ".join(f"[`{name}`]({page}#{name.lower()})" for name in names)
    return f"## [{title}]({page})\n\n{entries}\n"


def _slug(title: str) -> str:
    return re.sub(r"\W+", "_", title.lower()).strip("_")


def named() -> set[str]:
    """Return the names that have an entry."""
    return {name for _, names in GROUPS.values() for name in names.split()}


def describe(name: str, value: Any, module: str) -> str:
    """Return the entry of a function or class: a heading, and directives of Sphinx below it.

    The directives make each method an object of the search and of links.
    """
    docstring = inspect.getdoc(value) or ""
    is_error = inspect.isclass(value) and issubclass(value, BaseException)
    kind = "exception" if is_error else "class" if inspect.isclass(value) else "function"
    if name in MADE_BY_GETTERS:
        docstring = docstring.partition("\nArgs:")[0]
    signature = name if is_error or name in MADE_BY_GETTERS else _signature(name, value)
    lines = [*_prose(docstring)]
    if names := [f"{{py:class}}`{base.__name__}`" for base in _public_bases(value)]:
        lines.append(f"Inherits from {' and '.join(names)}.\n")
    if inspect.isclass(value):
        lines += _members(value)
    entry = _directive(kind, signature, lines, {"module": module})
    # Docstrings name pages of the repository, which are next to the reference on the site.
    entry = re.sub(r"\bdocs/(\w+)\.md", r"[\1](../\1.md)", entry)
    return f"## {name}\n\n{entry}"


def _directive(kind: str, signature: str, lines: list[str], options: dict[str, str]) -> str:
    fence = "`" * (5 if kind in ("method", "property") else 6)
    settings = [f":{name}: {value}".rstrip() for name, value in options.items()]
    return "\n".join([f"{fence}{{py:{kind}}} {signature}", *settings, "", *lines, fence, ""])


def _signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    result = "" if inspect.isclass(value) else _annotation(signature.return_annotation, " -> ")
    return f"{name}({', '.join(_parameters(signature))}){result}"


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    starred = False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        starred = starred or star == "*"
        text = star + parameter.name + _annotation(parameter.annotation, ": ")
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        yield text


def _annotation(annotation: Any, before: str) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return before + (
        annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    )


def _default(value: Any) -> str:
    text = repr(value)
    return getattr(value, "__name__", "...") if text.startswith("<") else text


def _prose(docstring: str) -> Iterator[str]:
    """Yield the lines of a docstring as Markdown: sections become lists, examples code."""
    section = ""
    for block in re.split(r"\n\s*\n", docstring):
        lines = block.splitlines()
        if lines and (heading := _SECTION.match(lines[0])):
            section, lines = heading[1], inspect.cleandoc("\n".join(["", *lines[1:]])).splitlines()
            if section in ("Raises", "Returns", "Yields"):
                yield f"{section}:\n"
        elif not block.startswith(" "):
            section = ""
        if not lines:
            continue
        is_code = section in ("Example", "Examples") or lines[0].lstrip().startswith(">>>")
        if is_code or (section == "" and block.startswith("    ")):
            yield "```\n" + inspect.cleandoc("\n".join(["", *lines])) + "\n```\n"
        elif section in ("Args", "Attributes", "Raises"):
            entries = (each for each in _entries(lines) if not each.startswith("- `legacy`"))
            yield "\n".join(entries) + "\n"
        else:
            yield " ".join(line.strip() for line in lines) + "\n"


def _entries(lines: list[str]) -> Iterator[str]:
    entry = ""
    for line in lines:
        if not line.startswith(" ") and (found := _ENTRY.match(line)):
            if entry:
                yield entry
            entry = f"- `{found[1]}`: {found[2]}"
        else:
            entry += f" {line.strip()}"
    yield entry


def _public_bases(value: Any) -> list[type]:
    """Return the nearest bases that have entries of their own."""
    streams = import_module(STREAMS)
    bases = [
        base
        for base in (value.__mro__[1:] if inspect.isclass(value) else ())
        if base.__name__ in named() or getattr(streams, base.__name__, None) is base
    ]
    return [base for base in bases if not any(base in each.__mro__[1:] for each in bases)]


def _members(kind: type) -> Iterator[str]:
    fields = (
        {field.name for field in dataclasses.fields(kind)}
        if dataclasses.is_dataclass(kind)
        else set()
    )
    for name in sorted(dir(kind)):
        hidden = name not in FOR_USERS.get(kind.__name__, {name})
        hidden = hidden or (name in OF_ALL_STAGES and kind.__module__.startswith(STREAMS))
        if name.startswith("_") or name in fields or hidden or _is_inherited(kind, name):
            continue
        value = inspect.getattr_static(kind, name)
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property):
            function = value.fget
        module = getattr(function, "__module__", None) or ""
        doc = inspect.getdoc(getattr(kind, name))
        if not module.startswith("energon") or not doc or not callable(function):
            continue
        lines = [*_prose(doc)]
        if isinstance(value, property):
            kind_of = _annotation(inspect.signature(function).return_annotation, "")
            yield _directive("property", name, lines, {"type": kind_of} if kind_of else {})
        else:
            options = {type(value).__name__: ""} if function is not value else {}
            yield _directive("method", _signature(name, function), lines, options)


def _is_inherited(kind: type, name: str) -> bool:
    return name not in kind.__dict__ and any(hasattr(base, name) for base in _public_bases(kind))


def _streams() -> dict[str, dict[str, str]]:
    """Return the entries of the names that `energon.webdataset` defines, by group."""
    module = import_module(STREAMS)
    groups: dict[str, dict[str, str]] = {
        f"{title} of streams (`{STREAMS}`)": {} for title in STREAM_GROUPS
    }
    homes = dict(zip(groups, STREAM_GROUPS.values(), strict=True))
    for name in sorted(module.__all__, key=str.lower):
        value = getattr(module, name)
        origin = getattr(value, "__module__", "")
        if origin.startswith(f"{STREAMS}.") and (
            inspect.isroutine(value) or inspect.isclass(value)
        ):
            home = origin.split(".")[2]
            title = next(title for title, modules in homes.items() if home in modules.split())
            groups[title][name] = describe(name, value, STREAMS)
    return groups
