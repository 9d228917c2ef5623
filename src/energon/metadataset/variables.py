"""Replace `${…}` in a document by variables of the document and of the environment.

    vars: {root: /data, boost: 3}
    splits:
      train:
        blend:
          - {path: "${root}/a", weight: "${boost}"}
          - {path: "${env:HOME}/b"}
          - {path: "${SCRATCH:-/tmp}/c"}

`${name}` is what `vars` has by that name, `${a.b}` an item of a mapping there, or else the
environment variable; `${env:NAME}` is the environment variable. Text behind `:-` stands for
what is not set. A value that is nothing but a reference has the type of what it refers to; text
of the environment is then read as YAML would read it. `$${` is a literal `${`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from energon.errors import SecurityError
from energon.formats.yaml import Map, Seq, marked_like, where
from energon.formats.yaml_scalars import scalar

_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<env>env:)?(?P<name>[^}:]*)(?::-(?P<default>[^}]*))?\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_-]+)*")
MAX_DEPTH = 20
"""How many variables may refer to one another in a row."""


class Unresolved(str):
    """Stands for the value of a reference that leads nowhere."""


def substitute(document: Map, *, allow_environment: bool) -> tuple[Map, list[str]]:
    """Return `document` with all references in values replaced; keys stay as they are.

    Args:
        document: What was read.
        allow_environment: Whether it may read the environment of this process.

    Returns:
        The document, with `Unresolved` for values that are references that lead nowhere, and a
        line for each of them.

    Raises:
        SecurityError: If it reads the environment and may not.
    """
    variables = document.get("vars")
    scope = _Scope(variables if isinstance(variables, Mapping) else {}, allow_environment)
    return scope.replace(document, 0), scope.problems


class _Scope:
    def __init__(self, variables: Mapping[str, Any], allow_environment: bool) -> None:
        self.variables = variables
        self.allow_environment = allow_environment
        self.problems: list[str] = []
        self.place = ""

    def replace(self, value: Any, depth: int) -> Any:
        """Return `value` with references replaced; what has none is the same object."""
        if isinstance(value, str):
            return self.text(value, depth) if "${" in value else value
        if isinstance(value, Map):
            items = {key: self.item(value, key, item, depth) for key, item in value.items()}
            if all(items[key] is item for key, item in value.items()):
                return value
            return marked_like(Map(items), value)
        if isinstance(value, Seq):
            entries = [self.item(value, i, item, depth) for i, item in enumerate(value)]
            if all(new is old for new, old in zip(entries, value, strict=True)):
                return value
            return marked_like(Seq(entries), value)
        return value

    def item(self, parent: Map | Seq, key: Any, value: Any, depth: int) -> Any:
        if isinstance(value, str) and "${" in value and not depth:
            self.place = where(parent, key)
        return self.replace(value, depth)

    def text(self, text: str, depth: int) -> Any:
        whole = _REFERENCE.fullmatch(text)
        if whole and whole["name"] is not None:
            return self.reference(whole, depth, whole=True)
        return _REFERENCE.sub(lambda match: self.inserted(match, depth), text)

    def inserted(self, match: re.Match[str], depth: int) -> str:
        if match["name"] is None:
            return "${"
        value = self.reference(match, depth, whole=False)
        if isinstance(value, Mapping | list):
            self.complain(match, "is no text that could be put into other text")
        return str(value)

    def reference(self, match: re.Match[str], depth: int, *, whole: bool) -> Any:
        """Return what a reference stands for."""
        name, default = match["name"], match["default"]
        if not _NAME.fullmatch(name):
            return self.complain(match, "wanted is a name, like ${root} or ${env:HOME}")
        if not match["env"]:
            found = self.variable(name)
            if found is not _ABSENT:
                if depth >= MAX_DEPTH:
                    return self.complain(match, "refers to itself")
                return self.replace(found, depth + 1)
        if "." not in name:
            self.check_environment(match)
            text = os.environ.get(name, default)
            if text is not None:
                return scalar(text) if whole else text
        elif default is not None:
            return scalar(default) if whole else default
        close = get_close_matches(name, [*map(str, self.variables), *os.environ], 1)
        hint = f", did you mean {close[0]!r}?" if close else "."
        return self.complain(
            match,
            f"is neither in `vars` nor in the environment{hint} ${{{name}:-default}} is "
            "for what need not be set",
        )

    def variable(self, name: str) -> Any:
        found: Any = self.variables
        for step in name.split("."):
            if not isinstance(found, Mapping) or step not in found:
                return _ABSENT
            found = found[step]
        return found

    def check_environment(self, match: re.Match[str]) -> None:
        if not self.allow_environment:
            raise SecurityError(
                f"{self.place}: {match[0]} reads the environment, which a remote document may not; "
                "define the name in `vars`, or copy the document to a local folder"
            )

    def complain(self, match: re.Match[str], problem: str) -> Unresolved:
        self.problems.append(f"{self.place}: {match[0]} {problem}")
        return Unresolved(match[0])


_ABSENT = object()
