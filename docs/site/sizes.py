"""Count the lines of each package and write the table of CONTRIBUTING.md: `make sizes`.

Lines are those that contain code: neither comments nor docstrings nor empty lines.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
HEAD = "| package | files before | lines before | files | lines |\n|---|---|---|---|---|\n"
COMPAT = "`compat/`, `src/megatron/`, before also `wrappers/`"
TOP, ALL = "top level, before also `transforms/`", "**all**"


def lines_of_code(text: str) -> int:
    """Return the number of lines of a module that contain code.

    Example:
        >>> lines_of_code('\"\"\"Nothing.\"\"\"\\n\\n# why\\nx = (1,\\n     2)\\n')
        2
    """
    found = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    scopes: list[ast.Module | ast.stmt] = [ast.parse(text)]
    while scopes:
        for node in getattr(scopes.pop(), "body", []):
            match node:
                case ast.Expr(value=ast.Constant(value=str())):
                    found.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
            scopes.append(node)
    return len(found)


def count_packages(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Return the files and lines of each package, by its name in the table."""
    files, lines = Counter[str](), Counter[str]()
    for path in (*root.glob("src/**/*.py"), *root.glob("plugins/*/src/**/*.py")):
        top, *inside, _ = path.relative_to(root).parts
        top_package = inside[0 if top == "src" else 1]
        package = f"`{inside[1]}/`" if len(inside) > 1 else TOP
        if top == "plugins":
            package = f"`plugins/{inside[0]}/`"
        elif top_package == "megatron" or package in ("`compat/`", "`wrappers/`"):
            package = COMPAT
        count = lines_of_code(path.read_text())
        for name in (package, ALL):
            files[name] += 1
            lines[name] += count
    return {name: (files[name], lines[name]) for name in files}


def written() -> dict[str, tuple[int, int]]:
    """Return the files and lines that the table says, by the name of the package."""
    rows = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()
    cells = [re.split(r" *\| *", row.strip("| ")) for row in rows]
    return {name.strip(): (_number(files), _number(lines)) for name, _, _, files, lines in cells}


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def main() -> None:
    """Write the present figures into the table."""
    text, now = PAGE.read_text(), count_packages()
    before, _, rest = text.partition(HEAD)
    table, _, after = rest.partition("\n\n")
    rows = []
    for row in table.splitlines():
        name, files_before, lines_before, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        files, lines = now[name]
        rows.append(f"| {name} | {files_before} | {lines_before} | {files} | {lines:,} |")
    PAGE.write_text(before + HEAD + "\n".join(rows) + "\n\n" + after)


if __name__ == "__main__":
    main()
