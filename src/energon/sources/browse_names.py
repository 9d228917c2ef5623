"""Names of samples and parts as names in a file system, whatever they are.

Names come from tar files that anybody may have written. Each becomes a name that stands for
itself and leads nowhere else, and back again:

| name | becomes | for |
|---|---|---|
| an empty one | `%` | `a//b.txt`, `/etc/passwd.txt` |
| `.` and `..` | `%2E` and `%2E%2E` | `../../a.txt` |
| `%…`, or one that ends in `%` and maybe digits | `%25%…` | names that look like these |
"""

from __future__ import annotations

import re

_DOTS = {"": "%", ".": "%2E", "..": "%2E%2E"}
_NAMES = {escaped: name for name, escaped in _DOTS.items()}
_LOOKS_ESCAPED = re.compile(r"%.*|.*%\d*", re.DOTALL)


def escape_name(name: str) -> str:
    """Return what one step of a path is called in the file system.

    Example:
        >>> [escape_name(name) for name in ("cat", "..", "", "100%")]
        ['cat', '%2E%2E', '%', '%25100%']
    """
    if name in _DOTS:
        return _DOTS[name]
    if "%" in name and _LOOKS_ESCAPED.fullmatch(name):
        return "%25" + name
    return name


def unescape_name(name: str) -> str | None:
    """Return what `escape_name` has made `name` of; None if nothing.

    Example:
        >>> [unescape_name(name) for name in ("cat", "%2E%2E", "%25100%", "100%")]
        ['cat', '..', '100%', None]
    """
    if name in _NAMES:
        return _NAMES[name]
    raw = name.removeprefix("%25") if name.startswith("%25") else name
    return raw if raw not in _DOTS and escape_name(raw) == name else None
