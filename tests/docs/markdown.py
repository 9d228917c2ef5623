"""What the tests need to know of a page: its code blocks, headings and links."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FENCE = re.compile(r"^```(\w*)\s*$")
_COMMENT = re.compile(r"^<!--\s*(.*?)\s*-->\s*$")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    `line` is that of its first line of code, counted from 1. `marker` is the HTML comment in
    the line before the fence. `follows` says whether nothing but blank lines stand between it
    and the block before.
    """

    language: str
    text: str
    line: int
    marker: str
    follows: bool


def find_blocks(page: str) -> list[Block]:
    blocks: list[Block] = []
    opened: tuple[str, int, str, bool] | None = None
    lines: list[str] = []
    marker, follows = "", False
    for number, line in enumerate(page.splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is not None:
            if line.rstrip() == "```":
                language, start, before, adjacent = opened
                blocks.append(Block(language, "\n".join(lines) + "\n", start, before, adjacent))
                opened, marker, follows = None, "", True
            else:
                lines.append(line)
        elif fence:
            opened, lines = (fence[1], number + 1, marker, follows), []
        elif comment := _COMMENT.match(line):
            marker = comment[1]
        elif line.strip():
            marker, follows = "", False
    if opened is not None:
        raise ValueError(f"the block that begins in line {opened[1]} has no end")
    return blocks


def prose(page: str) -> str:
    """Return the page without its code blocks and inline code, each line in its place."""
    outside = re.sub(
        r"^```.*?^```[^\S\n]*$",
        lambda block: "\n" * block[0].count("\n"),
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    return re.sub(r"`[^`\n]*`", "", outside)


def links(page: str) -> list[str]:
    return _LINK.findall(prose(page))


def anchors(page: str) -> set[str]:
    """Return the names under which GitHub makes the headings of a page known."""
    outside = re.sub(r"^```.*?^```\s*$", "", page, flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for line in outside.splitlines():
        if heading := _HEADING.match(line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            found.add(slug if slug not in found else f"{slug}-1")
    return found
