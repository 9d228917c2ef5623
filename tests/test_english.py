"""Texts that people read avoid turns that no native maintainer would write.

They are those of documents, `--help`, messages, docstrings and comments. Each pattern stands
beside what to write instead.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FEWER = (
    r"(?!longer|more|less|fewer|way|need|other|such|one|matter|different|better|faster|room|slower)"
)
BANNED = {
    r"\bwanted (is|are|was|were)( (the|an?|one))\b": "expected …",
    r"\banew\b": "again",
    r"\b(by|of) (itself|themselves)\b": "on its own, alone, automatically",
    r"^\W*Gives\b|: Gives\b|\b(what|that|which) \S+ (gives|gave)\b": "returns, yields",
    r"\b(function|call|hook|query|iterator) (gives|gave)\b": "returns, yields",
    r"\bpictures?\b(?!:)": "images",
    r"\bbecomes? of\b": "happens to",
    r"\bfound out\b": "detected",
    r"\b(go|goes|going|went) on\b(?! for\b)": "continue",
    r"\bwhich one came\b": "how often each was seen",
    r"\b(the way|the path) of a sample\b": "sample lifecycle",
    r"\b(is|are) too few for\b": "cannot be divided between, expected at least",
    r"\bbut no (numbers|order)\b": "cannot be indexed",
    r"\bto be asked\b": "is read through, is prompted for",
    r"\bwhat no option says\b": "anything not given as an option",
    r": at all\b": "default: all",
    r"\bbe it\b": "whether it is",
    rf"(?<!there )(?<!where )\b(is|are|was|were) no {FEWER}[a-z]": "is not a …",
    r"\bsomebody\b": "someone, you",
    r"\bmakes? no sense\b": "is invalid",
    r"\bwithout a word\b": "silently",
    r"\bfor ever\b": "forever, no limit",
    r"\bshall\b": "should, must, is to",
    r"\b(anyhow|of one's own)\b": "anyway, of your own",
    r"\b(has|have|having) (a|no) say\b": "affects, does not affect",
    r"\b(thereby|thereof|thereupon|therewith|likewise|hereby)\b": "so, of it, also",
    r"\blies? (in|inside|outside|beside|behind|between|beyond)\b": "is in, is next to, …",
    r"\bhand(s|ed|ing)? on\b": "passes on",
    r"\bgiven out\b": "yielded",
    r"\b(is|are|was|were) not there\b": "is missing, does not exist",
    r"\b(is|are|was|were) there already\b": "already exists",
    r"\b(that|which) (is|are) there\b": "that exists, existing",
    r"\bafresh\b": "again, from the start",
    r"\bby now\b": "now, meanwhile",
    r"(?<!not )\bso many\b": "this many, as many",
    r"\bhow many [a-z ]+ in all\b": "in total",
    r"\b(this loader|it) was closed; build\b": "is closed; build",
    r"\b(is|are|was|were) wanted\b": "is needed, is requested",
    r"\b(an?|the|some) [a-z]+ of (yours|theirs)\b": "your own …",
    r"\b(neighbour|colour|behaviour|favour)": "American spelling",
    r"\b(initial|recogn|organ|serial|normal)is(e|ing|ation)": "American spelling",
    r"\bwhat (is|are|was) there\b": "existing, the content",
    r"\bsay(s)? with --": "pass --",
    r"\bbe told any ?more\b": "is no longer known",
    r"\bkeeps? (their|its) books\b": "works differently, records",
    r"\bnobody knows (before|how|what|which)": "is not known",
    r"\bcomes? twice\b": "occurs twice, is repeated",
    r"\bfrom (0|one|it|`\w+`|\{\w+\}) on\b": "of … or more, from … onward",
    r"\b(checksum|state) does not fit\b|\bfits this\b": "does not match, matches",
    r"\btr(y|ies|ied) (it|them) out on\b|\bto try it on\b": "as an example",
    r"\b(word|words|names) it otherwise\b|\bkeep\w* \w+ otherwise\b": "differently",
}
TEXTS = [
    "README.md",
    "plugins/*/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "changes/*.md",
    "docs/*.md",
]
PROGRAMS = ["src/**/*.py", "plugins/*/src/**/*.py", "examples/**/*.py"]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page, without the targets of links."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        yield number, re.sub(r"\]\([^)]*\)", "]", line)


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments, docstrings and messages of a program."""
    for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT":
            yield token.start[0], token.string.lstrip("# ")
        elif kind in ("STRING", "FSTRING_MIDDLE"):
            for number, line in enumerate(token.string.splitlines(), start=token.start[0]):
                if " " in line.strip():
                    yield number, line.strip()


def problems(path: Path) -> list[str]:
    read = prose if path.suffix == ".md" else sentences
    return [
        f"{path.relative_to(ROOT)}:{number}: {found[0]!r}; write: {instead}\n    {text}"
        for number, text in read(path)
        for pattern, instead in BANNED.items()
        if (found := re.search(pattern, text, re.IGNORECASE))
    ]


@pytest.mark.parametrize("pattern", [*TEXTS, *PROGRAMS])
def test_texts_are_plain_english(pattern):
    found = [problem for path in sorted(ROOT.glob(pattern)) for problem in problems(path)]
    assert not found, "\n".join(found)


def test_finds_what_no_maintainer_would_write(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("This is a shard.\nWanted is a folder. [of](anew.md)\n")
    assert [number for number, text in prose(page) if "Wanted" in text] == [2]
    program = tmp_path / "program.py"
    program.write_text(
        '"""Gives samples."""\nname = "anew"\nmessage = "make it anew"  # going on\n'
    )
    assert [text for _, text in sentences(program)] == [
        '"""Gives samples."""',
        '"make it anew"',
        "going on",
    ]
