"""Count the lines of each capability and write the table of CONTRIBUTING.md: `make sizes`.

Lines are those that contain code: neither comments nor docstrings nor empty lines.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
HEAD = (
    "| capability | files before | lines before | target | files | lines |\n"
    "|---|---|---|---|---|---|\n"
)
ALL = "**all**"


class Capability(NamedTuple):
    """A row of the table.

    Attributes:
        name: What these modules do together.
        files: How many files it had at revision bde272bd; None if it came later.
        lines: How many lines of code it had there.
        target: How many lines it was to have.
        modules: Its modules and packages, below `energon`; the longest match counts.
    """

    name: str
    files: int | None
    lines: int | None
    target: int | None
    modules: tuple[str, ...]


CAPABILITIES = (
    Capability(
        "errors, limits, messages, ranks, public names",
        14,
        846,
        750,
        (
            "__init__",
            "__main__",
            "arguments",
            "arrays",
            "errors",
            "installation",
            "limits",
            "local_file",
            "messages",
            "surroundings",
            "testing",
            "version",
            "worker",
        ),
    ),
    Capability(
        "tar: parse, scan, stream, write",
        10,
        1505,
        950,
        (
            "formats/tar",
            "formats/__init__",
        ),
    ),
    Capability("part tables and other indexes of shards", 7, 1006, 700, ("formats/tables",)),
    Capability(
        "`.nv-meta` documents",
        9,
        830,
        700,
        (
            "formats/meta",
            "formats/text",
        ),
    ),
    Capability(
        "JSON Lines, plain and compressed",
        8,
        1429,
        510,
        (
            "formats/meta/jsonl",
            "formats/compressed",
            "sources/tables/jsonl",
            "prepare/jsonl",
        ),
    ),
    Capability(
        "Parquet, Arrow",
        10,
        1503,
        1020,
        (
            "formats/parquet",
            "formats/arrow",
            "sources/tables",
        ),
    ),
    Capability("MDS, LitData (`plugins/energon-mds`)", 8, 1055, 650, ("energon_mds",)),
    Capability(
        "token files",
        7,
        1205,
        900,
        (
            "formats/tokens",
            "sources/tables/token_corpus",
            "sources/tables/token_files",
            "prepare/writers/tokens",
            "plan/leaves/token_windows",
        ),
    ),
    Capability(
        "folders of media",
        4,
        487,
        400,
        ("sources/media_folder",),
    ),
    Capability(
        "joins by key",
        5,
        740,
        480,
        (
            "sources/join",
            "task_encoder/open_join",
        ),
    ),
    Capability(
        "shards of samples",
        4,
        976,
        820,
        (
            "sources/webdataset",
            "sources/webdataset_kind",
            "sources/shards",
            "sources/shard_samples",
        ),
    ),
    Capability("kinds, reader, read-ahead", 8, 1076, 820, ("sources",)),
    Capability(
        "stores of files, cache pools",
        14,
        1893,
        950,
        (
            "sources/files",
            "cache",
        ),
    ),
    Capability(
        "samples as files, mount",
        6,
        889,
        500,
        (
            "sources/tree",
            "sources/open_tree",
            "cli/mount",
            "cli/mount_fuse",
        ),
    ),
    Capability("addresses, files, atomic writes, locks", 12, 1162, 950, ("io",)),
    Capability(
        "object stores",
        11,
        2080,
        1300,
        (
            "io/store",
            "io/range_file",
            "io/backends",
            "io/settings",
            "io/threads",
        ),
    ),
    Capability(
        "disk cache",
        2,
        434,
        250,
        ("io/disk_cache",),
    ),
    Capability("plan: order, blends, epochs", 17, 2172, 1900, ("plan",)),
    Capability("stages and hooks", 22, 3154, 1880, ("stages",)),
    Capability("task encoder, recipe", 13, 1922, 1500, ("task_encoder",)),
    Capability("loader: order, states, other lanes", 18, 2475, 1750, ("loader",)),
    Capability(
        "worker processes",
        8,
        1142,
        850,
        (
            "loader/processes",
            "loader/workers",
            "loader/lane_worker",
            "loader/replaceable_worker",
            "loader/hosting",
        ),
    ),
    Capability(
        "transport of batches",
        9,
        1184,
        800,
        (
            "loader/transport",
            "loader/memory",
        ),
    ),
    Capability("monitoring", 10, 1559, 700, ("loader/monitoring",)),
    Capability(
        "doctor",
        4,
        735,
        400,
        (
            "inspect/doctor",
            "cli/doctor",
        ),
    ),
    Capability("prepare: index, split, engines", 15, 1986, 1610, ("prepare",)),
    Capability(
        "verify, repair, quarantine",
        11,
        1291,
        780,
        (
            "prepare/verify",
            "cli/verify",
        ),
    ),
    Capability(
        "pack",
        15,
        2454,
        1800,
        (
            "prepare/writers",
            "prepare/importers",
            "prepare/sample_fields",
            "cli/pack",
        ),
    ),
    Capability(
        "facts of media",
        5,
        758,
        560,
        (
            "formats/media",
            "prepare/media",
        ),
    ),
    Capability(
        "`energon prepare`, its assistant",
        6,
        1009,
        600,
        (
            "cli/prepare",
            "prepare/assistant",
        ),
    ),
    Capability("metadatasets", 13, 2089, 1580, ("metadataset",)),
    Capability("decode", 11, 1750, 1430, ("decode",)),
    Capability(
        "transforms, packing",
        5,
        520,
        480,
        (
            "transforms",
            "packing",
        ),
    ),
    Capability("samples", 8, 1039, 900, ("samples",)),
    Capability(
        "browser and previews",
        22,
        3236,
        2130,
        (
            "viewer",
            "samples/display",
            "cli/preview",
            "cli/view",
            "cli/demo",
        ),
    ),
    Capability(
        "info, lint, plan, checkpoint",
        14,
        2224,
        1650,
        (
            "inspect",
            "cli/info",
            "cli/lint",
            "cli/plan",
            "cli/checkpoint",
            "cli/analyze_debug",
            "sources/part_statistics",
        ),
    ),
    Capability("frame of the command line", 4, 434, 350, ("cli",)),
    Capability(
        "`energon tar`",
        11,
        1314,
        700,
        (
            "cli/tar",
            "cli/tar_commands",
            "webdataset/tools",
        ),
    ),
    Capability("`energon.webdataset`", 56, 7669, 4960, ("webdataset",)),
    Capability(
        "`energon.compat.megatron`",
        36,
        4825,
        3300,
        (
            "compat",
            "megatron",
        ),
    ),
    Capability(
        "measures, text index",
        None,
        None,
        None,
        (
            "sources/measures",
            "formats/tables/measure_table",
            "inspect/measure",
            "inspect/text_index",
            "cli/measure",
        ),
    ),
    Capability(
        "balance, planned packs",
        None,
        None,
        None,
        (
            "plan/balance",
            "plan/deal",
            "plan/dealt",
            "plan/fill",
            "plan/packs",
        ),
    ),
    Capability(
        "replicas, shared workers",
        None,
        None,
        None,
        (
            "loader/replicas",
            "loader/shared_workers",
        ),
    ),
    Capability("Ray actors", None, None, None, ("loader/ray_actors",)),
)


def lines_of_code(text: str) -> int:
    """Return the number of lines of a module that contain code.

    Example:
        >>> lines_of_code('\"\"\"Nothing.\"\"\"\\n\\n# why\\nx = (1,\\n     2)\\n')
        2
    """
    code = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    scopes: list[ast.Module | ast.stmt] = [ast.parse(text)]
    while scopes:
        for node in getattr(scopes.pop(), "body", []):
            match node:
                case ast.Expr(value=ast.Constant(value=str())):
                    code.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
            scopes.append(node)
    return len(code)


def count_capabilities(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Return the files and lines of each capability, by its name.

    Raises:
        LookupError: If a module belongs to none, or a row names a module that does not exist.
    """
    counts = {capability.name: (0, 0) for capability in CAPABILITIES}
    owners = {each: capability.name for capability in CAPABILITIES for each in capability.modules}
    unused = set(owners)
    for path in (*root.glob("src/**/*.py"), *root.glob("plugins/*/src/**/*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = "/".join(parts[parts.index("src") + 1 :]).removeprefix("energon/")
        owner = next((each for each in _and_parents(module) if each in owners), None)
        if owner is None:
            raise LookupError(f"{module}: add it to a row of CAPABILITIES")
        unused.discard(owner)
        files, lines = counts[owners[owner]]
        counts[owners[owner]] = files + 1, lines + lines_of_code(path.read_text())
    if unused:
        raise LookupError(f"{', '.join(sorted(unused))}: no such modules; correct CAPABILITIES")
    counts[ALL] = sum(f for f, _ in counts.values()), sum(n for _, n in counts.values())
    return counts


def _and_parents(module: str) -> list[str]:
    parts = module.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]


def written() -> dict[str, tuple[int, int]]:
    """Return the files and lines that the table says, by the name of the capability."""
    rows = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()
    cells = [re.split(r" *\| *", row.strip("| ")) for row in rows]
    return {name: (_number(files), _number(lines)) for name, *_, files, lines in cells}


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def main() -> None:
    """Write the present figures into the table."""
    before, _, rest = PAGE.read_text().partition(HEAD)
    after = rest.partition("\n\n")[2]
    counts = count_capabilities()
    total = Capability(
        ALL,
        sum(each.files or 0 for each in CAPABILITIES),
        sum(each.lines or 0 for each in CAPABILITIES),
        sum(each.target or 0 for each in CAPABILITIES),
        (),
    )
    rows = [
        _row(each.name, each.files, each.lines, each.target, *counts[each.name])
        for each in (*CAPABILITIES, total)
    ]
    PAGE.write_text(f"{before}{HEAD}{''.join(rows)}\n{after}")


def _row(name: str, *numbers: int | None) -> str:
    cells = ("" if number is None else f"{number:,}" for number in numbers)
    return f"| {name} | {' | '.join(cells)} |\n"


if __name__ == "__main__":
    main()
