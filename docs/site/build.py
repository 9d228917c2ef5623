"""Build the site of the documentation: `make docs`, offline; a warning is an error.

Pages in docs/ are plain Markdown that reads as well on a forge. Here they are copied into a
folder of sources, to which come the API reference, the sources of examples, the changes, and the
navigation. The titles in the side bar are those of the pages.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
import textwrap
import webbrowser
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from docs.site import reference

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/site"
SOURCES = BUILD / "sources"
MENU = {
    "Tutorials": (
        "getting_started from_webdataset finetune_vlm pretrain_gpt train_clip train_whisper "
        "cluster migration"
    ),
    "Guides": (
        "prepare pack kinds media storage check explore blend hooks packing aux extend trainers "
        "save_and_resume balance plan operate webdataset"
    ),
    "Reference": "api/index command_line errors formats security",
    "About": ("how_it_works reliability benchmarks benchmarks_parts faq changes contributing"),
}
"""The pages of each part of the documentation, in the order of the side bar."""
_API = "[API reference](api/index.md)"  # these pages exist on the site only


def build() -> int:
    """Write the site to build/site/html; return the exit code of Sphinx."""
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCES, ignore=shutil.ignore_patterns("site", "*.py"))
    _adopt("CHANGELOG.md", "changes.md")
    _adopt("CONTRIBUTING.md", "contributing.md")
    _write_reference()
    _write_gallery()
    _write_navigation()
    arguments = [
        "-q",
        "-W",
        "--keep-going",
        "-j",
        "2",
        "-b",
        "html",
        "-c",
        str(Path(__file__).parent),
    ]
    return sphinx([*arguments, "-d", str(BUILD / "doctrees"), str(SOURCES), str(BUILD / "html")])


def _adopt(path: str, name: str) -> None:
    """Take a page in from the root of the repository, and turn links to and from it."""
    text = (ROOT / path).read_text()
    (SOURCES / name).write_text(
        re.sub(r"\]\(docs/", "](", text).replace("(CHANGELOG.md", "(changes.md")
    )
    for page in SOURCES.glob("*.md"):
        page.write_text(page.read_text().replace(f"](../{path}", f"]({name}"))


def _write_reference() -> None:
    """Write the pages of the API, and link to them from the first page."""
    folder = SOURCES / "api"
    folder.mkdir()
    names = []
    for name, text in reference.pages().items():
        (folder / f"{name}.md").write_text(text)
        names.append(name)
    (folder / "index.md").write_text(reference.overview() + _toctree("", names))
    for page in SOURCES.glob("*.md"):
        page.write_text(page.read_text().replace("API reference<!-- api -->", _API))


def _write_gallery() -> None:
    """Show the programs that pages name: what each says about itself, and its source."""
    for page in SOURCES.glob("*.md"):
        line = re.compile(r"^`(examples/[^`]+)`$", re.MULTILINE)
        page.write_text(line.sub(lambda found: _program(found[1]), page.read_text()))


def _program(name: str) -> str:
    path = ROOT / name
    source = path.read_text()
    about, language = "", {".py": "python", ".yaml": "yaml"}.get(path.suffix, "bash")
    if path.suffix == ".py":
        _, _, about = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    fold = f"<details>\n<summary>Source</summary>\n\n```{language}\n{source}```\n\n</details>"
    return f"`{name}`\n\n{_as_prose(about)}\n\n{fold}"


def _as_prose(docstring: str) -> str:
    """Return a docstring as Markdown: what is indented is code."""
    parts = re.split(r"\n\s*\n", docstring.strip("\n"))
    return "\n\n".join(
        f"```\n{textwrap.dedent(part)}\n```" if part.startswith("    ") else part.strip()
        for part in parts
    )


def _write_navigation() -> None:
    """Append the side bar to the first page."""
    with (SOURCES / "index.md").open("a") as index:
        index.writelines(_toctree(part, pages.split()) for part, pages in MENU.items())


def _toctree(caption: str, pages: list[str]) -> str:
    lines = [f":caption: {caption}"] if caption else []
    return "\n".join(["", "```{toctree}", ":hidden:", *lines, "", *pages, "```", ""])


def has_display() -> bool:
    """Return whether someone is there to look at the site: not in CI, nor over plain SSH."""
    if os.environ.get("CI") or not sys.stdout.isatty():
        return False
    names = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in names)


if __name__ == "__main__":
    code = build()
    if code == 0:
        page = BUILD / "html/index.html"
        print(f"The documentation is in {page}")
        if has_display():
            webbrowser.open(page.as_uri())
    sys.exit(code)
