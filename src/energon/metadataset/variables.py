"""Replace `${…}` in a document by variables of the document and of the environment.

    vars: {root: /data, boost: 3}
    splits:
      train:
        blend:
          - {path: "${root}/a", weight: "${boost}"}
          - {path: "${env:HOME}/b"}
          - {path: "${SCRATCH:-/tmp}/c"}

`${name}` is the entry of `vars` with that name, `${a.b}` an item of a mapping there, or else an
environment variable; `${env:NAME}` is always an environment variable. Text after `:-` is the
default. A value that consists of a single reference has the type of what it refers to; environment
variables are then parsed as YAML. `$${` is a literal `${`.

The environment contains secrets, which a document could put into a URL. So it is read only if the
user allows "env", and never for a document that is not on this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from energon.errors import ConfigError, SecurityError
from energon.formats.meta.yaml import MarkedMap, Seq, marked_like, scalar, where
from energon.limits import DOCUMENT_DEPTH, EXPANDED_CHARACTERS, EXPANDED_VALUES, is_allowed, refusal
from energon.messages import nearest

_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<env>env:)?(?P<name>[^{}:]*)(?::-(?P<default>[^}]*))?\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_-]+)*")
MAX_NESTED_VARIABLES = 20
"""Longest chain of variables that refer to one another."""
MAX_PROPOSED_VARIABLES = 20
"""How many unknown references get a suggestion."""


class Unresolved(str):
    """Stands for the value of an unknown reference."""


def substitute(
    document: MarkedMap, *, is_remote: bool = False, allow: Collection[str] = ()
) -> tuple[MarkedMap, list[str]]:
    """Return `document` with all references in values replaced; keys stay as they are.

    Args:
        document: The parsed document.
        is_remote: Whether it comes from another machine; then it never reads the environment.
        allow: "env" permits references to environment variables.

    Returns:
        The document, with `Unresolved` for unknown references, and a line for each of them.

    Raises:
        SecurityError: If it reads the environment, which is not allowed.
        ConfigError: If its references expand to more than the limits allow.
    """
    variables = document.get("vars")
    scope = _Scope(
        variables if isinstance(variables, Mapping) else {},
        is_remote=is_remote,
        may_read=not is_remote and is_allowed("env", allow),
    )
    return scope.replace(document, 0), [*scope.problems]


class _Scope:
    def __init__(self, variables: Mapping[str, Any], *, is_remote: bool, may_read: bool) -> None:
        self.variables = variables
        self.is_remote = is_remote
        self.may_read = may_read
        self.problems: dict[str, None] = {}
        self.location = ""
        self.level = 0
        self.deepest = DOCUMENT_DEPTH.value
        self.values = EXPANDED_VALUES.value
        self.characters = EXPANDED_CHARACTERS.value

    def replace(self, value: Any, depth: int) -> Any:
        """Return `value` with references replaced; without any, the same object."""
        if isinstance(value, str):
            return self.text(value, depth) if "${" in value else value
        if not isinstance(value, MarkedMap | Seq):
            return value
        if self.level >= self.deepest:
            raise ConfigError(
                f"{self.location}: with its references, the document is nested deeper than "
                f"{self.deepest} levels; {DOCUMENT_DEPTH.hint}"
            )
        self.level += 1
        replaced = self.items(value, depth)
        self.level -= 1
        return replaced

    def items(self, value: MarkedMap | Seq, depth: int) -> MarkedMap | Seq:
        replaced: MarkedMap | Seq
        if isinstance(value, MarkedMap):
            replaced = MarkedMap(
                {key: self.item(value, key, each, depth) for key, each in value.items()}
            )
            changed = any(replaced[key] is not each for key, each in value.items())
        else:
            replaced = Seq(self.item(value, at, each, depth) for at, each in enumerate(value))
            changed = any(new is not old for new, old in zip(replaced, value, strict=True))
        return marked_like(replaced, value) if changed else value

    def item(self, parent: MarkedMap | Seq, key: Any, value: Any, depth: int) -> Any:
        if isinstance(value, str) and "${" in value and not depth:
            self.location = where(parent, key)
        return self.replace(value, depth)

    def text(self, text: str, depth: int) -> Any:
        whole = _REFERENCE.fullmatch(text)
        if whole and whole["name"] is not None:
            value = self.reference(whole, depth, whole=True)
            self.spend(value)
            return value
        # There is no reference after the last brace, so do not search for its end.
        end = text.rfind("}") + 1
        return _REFERENCE.sub(lambda match: self.inserted(match, depth), text[:end]) + text[end:]

    def inserted(self, match: re.Match[str], depth: int) -> str:
        if match["name"] is None:
            return "${"
        value = self.reference(match, depth, whole=False)
        if isinstance(value, Mapping | list):
            self.complain(match, "is not text that could be put into other text")
            return match[0]
        self.spend(value)
        return str(value)

    def spend(self, value: Any) -> None:
        """Count what a reference expands to, including nested values."""
        ahead = [iter((value,))]
        while ahead:
            each = next(ahead[-1], _ABSENT)
            if each is _ABSENT:
                ahead.pop()
                continue
            self.values -= 1
            if isinstance(each, str):
                self.characters -= len(each)
            elif isinstance(each, MarkedMap):
                ahead.append(iter(each.values()))
            elif isinstance(each, Seq):
                ahead.append(iter(each))
            if self.values < 0 or self.characters < 0:
                limit = EXPANDED_VALUES if self.values < 0 else EXPANDED_CHARACTERS
                raise ConfigError(
                    f"{self.location}: the references of this document expand to more than "
                    f"{limit.value:,} {limit.meaning.split()[0]}; {limit.hint}"
                )

    def reference(self, match: re.Match[str], depth: int, *, whole: bool) -> Any:
        """Return the value of a reference."""
        name, default = match["name"], match["default"]
        self.spend(None)
        if not _NAME.fullmatch(name):
            return self.complain(match, "expected a name, like ${root} or ${env:HOME}")
        if not match["env"]:
            value = self.variable(name)
            if value is not _ABSENT:
                if depth >= MAX_NESTED_VARIABLES:
                    return self.complain(match, "refers to itself")
                return self.replace(value, depth + 1)
        if "." not in name and self.reads_environment(match):
            text = os.environ.get(name, default)
            if text is not None:
                return scalar(text) if whole else text
        elif default is not None:
            return scalar(default) if whole else default
        names = chain(os.environ if self.may_read else (), self.variables)
        close = nearest(name, names) if len(self.problems) < MAX_PROPOSED_VARIABLES else None
        hint = f", did you mean {close!r}?" if close else "."
        return self.complain(
            match,
            f"is neither in `vars` nor in the environment{hint} ${{{name}:-default}} gives it a "
            "default",
        )

    def variable(self, name: str) -> Any:
        value: Any = self.variables
        for step in name.split("."):
            if not isinstance(value, Mapping) or step not in value:
                return _ABSENT
            value = value[step]
        return value

    def reads_environment(self, match: re.Match[str]) -> bool:
        """Return whether to look up a reference that is not in `vars` in the environment.

        Raises:
            SecurityError: If that is not allowed.
        """
        if self.may_read:
            return True
        wants = match["env"] or match["default"] is not None or match["name"] in os.environ
        if self.is_remote:
            raise SecurityError(
                f"{self.location}: {match[0]} reads the environment, which a remote document may "
                "not; define the name in `vars`, or copy the document to a local folder"
            )
        if wants:
            raise refusal(
                "env",
                f"{self.location}: {match[0]} reads the environment, where secrets are; define the "
                "name in `vars`",
            )
        return False

    def complain(self, match: re.Match[str], problem: str) -> Unresolved:
        self.problems[f"{self.location}: {match[0]} {problem}"] = None
        return Unresolved(match[0])


_ABSENT = object()
