"""Names of samples and parts as names in a file system, whatever they are.

Names come from tar files that anybody may have written. Each step of a path becomes a name that
stands for itself, leads nowhere else, and is not too long for a kernel:

| step | becomes | as in |
|---|---|---|
| an empty one | `%` | `a//b.txt`, `/etc/passwd.txt` |
| `.` and `..` | `%2E` and `%2E%2E` | `../../a.txt` |
| `%`, and a zero byte or a slash in a step | `%25`, `%00`, `%2F` | `100%.txt` |

A mark at the end, `%~` and letters, tells things apart that would have the same name, and stands
for the rest of names that are too long.
"""

from __future__ import annotations

import re
from hashlib import blake2b

MAX_BYTES = 255
"""What file systems and programs take for the longest name."""
MARK = "%~"
_DOTS = {"": "%", ".": "%2E", "..": "%2E%2E"}
_NAMES = {escaped: name for name, escaped in _DOTS.items()}
_ESCAPED = {"%": "%25", "\0": "%00", "/": "%2F"}
_IMPOSSIBLE = frozenset("/\0")
_SEQUENCE = re.compile(r"%(..)?", re.DOTALL)
_RAW = {escaped[1:]: raw for raw, escaped in _ESCAPED.items()}


def escape_name(name: str) -> str:
    """Return what one step of a path is called in the file system.

    Example:
        >>> [escape_name(name) for name in ("cat", "..", "", "100%")]
        ['cat', '%2E%2E', '%', '100%25']
    """
    if name in _DOTS:
        return _DOTS[name]
    if "%" in name or "\0" in name or "/" in name:
        name = re.sub("[%\0/]", lambda found: _ESCAPED[found[0]], name)
    data = name.encode("utf-8", "surrogateescape")
    if len(data) <= MAX_BYTES:
        return name
    mark = MARK + blake2b(data, digest_size=8).hexdigest()
    return data[: MAX_BYTES - len(mark) - 3].decode("utf-8", "ignore") + mark


def mark_name(name: str, mark: str) -> str:
    """Return an escaped name with a mark, so that it is the name of nothing else.

    Example:
        >>> mark_name("cat.jpg", "2")
        'cat.jpg%~2'
    """
    data = f"{name}{MARK}{mark}".encode("utf-8", "surrogateescape")
    if len(data) <= MAX_BYTES:
        return f"{name}{MARK}{mark}"
    whole = blake2b(data, digest_size=8).hexdigest()
    return name[: MAX_BYTES // 4 - len(whole)] + MARK + whole


def unescape_name(name: str) -> str | None:
    """Return the step that `escape_name` has made a name of; None if none, or if it has a mark.

    Example:
        >>> [unescape_name(name) for name in ("cat", "%2E%2E", "100%25", "100%")]
        ['cat', '..', '100%', None]
    """
    if name in _NAMES:
        return _NAMES[name]
    if "\0" in name or "/" in name:
        return None
    if not _IMPOSSIBLE.isdisjoint(name):
        return None
    if "%" not in name:
        return None if name in _DOTS else name
    if any(sequence not in _RAW for sequence in _SEQUENCE.findall(name)):
        return None
    raw = _SEQUENCE.sub(lambda found: _RAW[found[1]], name)
    return None if raw in _DOTS else raw
