"""Read YAML with locations, so that every later message can name file, line and column; write it.

Anchors, aliases and merge keys (`<<`) work. Refused, because they hide mistakes or do harm:
duplicate keys (unless the last one is to count), explicit tags, keys that are not scalars, aliases
within what they refer to, more than one document, very deep nesting and aliases that multiply.

PyYAML (libyaml, if available) parses to events, which are interpreted here.

The dialect is that of Megatron-Energon's reader, plus what YAML 1.2 adds without contradicting it.
Plain scalars mean:

    null ~ (nothing)          None          true yes / false no      booleans (any case)
    12  -3  1_000  010        1000, 10      1.5  1e5  .5  .inf       floats
    0x10  on  off  2024-01-01 text          everything quoted        text
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from energon.errors import ConfigError, FormatError
from energon.limits import ALIASED_VALUES, DOCUMENT_DEPTH, LISTED_VALUES, check_document
from energon.messages import warn_once

if TYPE_CHECKING:
    import yaml

logger = logging.getLogger("energon")

_NUMBER = re.compile(r"[-+.0-9][-+._0-9eE]*")  # which of them are numbers, Python knows
_FRACTIONAL = frozenset(".eE")
_WORDS = {
    **dict.fromkeys(("", "~", "null")),
    **dict.fromkeys(("true", "yes"), True),
    **dict.fromkeys(("false", "no"), False),
    **{".nan": math.nan, ".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf},
}
_LONGEST_WORD = 5


def scalar(text: str) -> Any:
    """Return the value of a plain (unquoted) scalar."""
    if len(text) <= _LONGEST_WORD and (word := text.lower()) in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(text):
        with suppress(ValueError):
            return int(text) if _FRACTIONAL.isdisjoint(text) else float(text)
    return text


_HINTS = {
    "mapping values are not allowed": "a value that contains ': ' needs quotes",
    "cannot start any token": "indent with spaces, and quote values that start with @, ` or %",
}


class Mark(NamedTuple):
    """A location in a file, both numbers counted from 1."""

    line: int
    column: int


class MarkedMap(dict[Any, Any]):
    """A mapping that knows its location: where it starts, and `marks[key]` for each key.

    Without a mark it was not read from a file, and `origin` is its path in a document.
    """

    __slots__ = ("mark", "marks", "origin")
    mark: Mark | None
    marks: dict[Any, Mark]
    origin: str


class Seq(list[Any]):
    """A sequence that knows its location: where it starts, and `marks` for each item."""

    __slots__ = ("mark", "marks", "origin")
    mark: Mark | None
    marks: list[Mark]
    origin: str


def load(text: str | bytes, *, origin: str, repeated_keys: bool = False) -> Any:
    """Return the document in `text`: `MarkedMap`, `Seq` or a scalar; None if there is none.

    Values behind an alias are shared, not copied.

    Args:
        text: The document; bytes are UTF-8.
        origin: Name of the file, for messages and `where`.
        repeated_keys: Whether to accept duplicate keys: the last one counts, with a warning.

    Raises:
        FormatError: If it is not YAML, uses a refused feature, or exceeds the limits; starts with
            `origin:line:column`.
    """
    # Importing it takes 12 ms, and programs import this module before they have a document to read.
    import yaml

    check_document(len(text), origin)
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        events = _parser_class()(text.removeprefix("\ufeff")).get_event
        return _Composer(events, origin, repeated_keys).document()
    except yaml.MarkedYAMLError as exc:
        raise FormatError(_explain(exc, origin)) from exc
    except yaml.reader.ReaderError as exc:
        raise FormatError(f"{_find(chr(exc.character), text, origin)}: {exc.reason}") from exc
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1
        raise FormatError(f"{origin}:{line}: byte {exc.object[exc.start]:#x} is not UTF-8") from exc
    except UnicodeEncodeError as exc:
        raise FormatError(
            f"{origin}: {exc.object[exc.start]!a} is half of a surrogate pair, expected a character"
        ) from exc


@contextmanager
def as_configuration() -> Iterator[None]:
    """Raise ConfigError for a malformed document: users edit it, so no data are damaged."""
    try:
        yield
    except FormatError as error:
        raise ConfigError(str(error)) from error


def where(node: Any, key: Any = None) -> str:
    """Return `file:line:column` of a loaded `node`, or of its item `key`, for use in messages."""
    if not isinstance(node, MarkedMap | Seq):
        return "document"
    if node.mark is None:
        return node.origin + ("" if key is None else f"[{key}]" if type(key) is int else f".{key}")
    mark = node.mark
    if isinstance(node, MarkedMap):
        mark = node.marks.get(key, mark)
    elif key is not None:
        mark = node.marks[key]
    return f"{node.origin}:{mark.line}:{mark.column}"


def marked_like(content: MarkedMap | Seq, node: MarkedMap | Seq) -> Any:
    """Return `content`, a changed copy of `node`, with the marks of `node`."""
    content.origin, content.mark = node.origin, node.mark
    content.marks = node.marks
    return content


def plain(value: Any) -> Any:
    """Return a copy of `value` in which all mappings are `dict` and all sequences `list`."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _parser_class() -> Any:
    try:
        from yaml._yaml import CParser
    except ImportError:  # PyYAML was built without libyaml: the same events, ten times slower
        from yaml import SafeLoader

        return SafeLoader
    return CParser


class _Composer:
    """Builds values from events, and knows the anchors met so far."""

    def __init__(self, next_event: Callable[[], Any], origin: str, repeated_keys: bool) -> None:
        from yaml import events

        self.kinds = events
        self.next_event = next_event
        self.origin = origin
        self.repeated_keys = repeated_keys
        self.anchors: dict[str, tuple[Any, int, int]] = {}  # value, nodes, height
        self.open_anchors: set[str] = set()
        self.nodes = 0
        self.aliased_nodes = 0
        self.deepest = 0
        self.max_depth = DOCUMENT_DEPTH.value
        self.max_aliased = ALIASED_VALUES.value
        self.listed, self.max_listed = 0, LISTED_VALUES.value

    def document(self) -> Any:
        self.next_event()  # start of the stream
        if type(self.next_event()) is self.kinds.StreamEndEvent:
            return None
        value = self.node(self.next_event(), 0)
        self.next_event()  # end of the document
        event = self.next_event()
        if type(event) is self.kinds.DocumentStartEvent:
            self.refuse(event, "a second document starts here; a file holds one")
        return value

    def node(self, event: Any, depth: int) -> Any:
        if type(event) is self.kinds.AliasEvent:
            return self.alias(event, depth)
        self.nodes += 1
        if event.tag is not None:
            self.refuse(event, f"tag {event.tag!r}; tags are not supported, quotes make text")
        if event.anchor is None:
            return self.content(event, depth)
        return self.anchored(event, depth)

    def content(self, event: Any, depth: int) -> Any:
        kind = type(event)
        if kind is self.kinds.ScalarEvent:
            return scalar(event.value) if event.implicit[0] else event.value
        if depth >= self.max_depth:
            self.refuse_depth(event)
        if depth >= self.deepest:
            self.deepest = depth + 1
        build = self.mapping if kind is self.kinds.MappingStartEvent else self.sequence
        return build(event, depth)

    def mapping(self, event: Any, depth: int) -> MarkedMap:
        result, merges = MarkedMap(), []
        result.origin, result.mark = self.origin, _mark(event)
        marks = result.marks = {}
        while type(key_event := self.next_event()) is not self.kinds.MappingEndEvent:
            key = self.key(key_event, depth)
            if key in marks:
                self.repeated(key_event, key, marks[key].line)
            marks[key] = _mark(key_event)
            value = self.node(value_event := self.next_event(), depth + 1)
            if key == "<<" and type(key_event) is self.kinds.ScalarEvent and key_event.implicit[0]:
                merges += self.merge_sources(value, value_event)
            else:
                result[key] = value
        for source in merges:
            for key, value in source.items():
                if key not in result:
                    result[key], marks[key] = value, source.marks[key]
        return result

    def sequence(self, event: Any, depth: int) -> Seq:
        result = Seq()
        result.origin, result.mark = self.origin, _mark(event)
        marks = result.marks = []
        while type(item := self.next_event()) is not self.kinds.SequenceEndEvent:
            marks.append(_mark(item))
            # Text and numbers take little: a split may list as many shards and samples as it has.
            self.listed += type(item) is not self.kinds.ScalarEvent
            if self.listed > self.max_listed:
                self.refuse(
                    item,
                    f"lists have more than {self.max_listed:,} mappings and lists; "
                    f"{LISTED_VALUES.hint}",
                )
            result.append(self.node(item, depth + 1))
        return result

    def key(self, event: Any, depth: int) -> Any:
        if type(event) in (self.kinds.MappingStartEvent, self.kinds.SequenceStartEvent):
            self.refuse(event, "a key must be a scalar, not a mapping or sequence")
        key = self.node(event, depth + 1)
        if isinstance(key, MarkedMap | Seq):
            self.refuse(event, "a key must be a scalar, not an alias of a mapping or sequence")
        return key

    def merge_sources(self, value: Any, event: Any) -> list[MarkedMap]:
        sources = value if isinstance(value, Seq) else [value]
        if not all(isinstance(source, MarkedMap) for source in sources):
            self.refuse(event, "'<<' merges mappings: expected an alias, or a list of aliases")
        return list(sources)

    def anchored(self, event: Any, depth: int) -> Any:
        nodes, deepest = self.nodes, self.deepest
        self.deepest = depth
        self.open_anchors.add(event.anchor)
        value = self.content(event, depth)
        self.open_anchors.discard(event.anchor)
        height = self.deepest - depth
        self.deepest = max(deepest, self.deepest)
        self.anchors[event.anchor] = value, self.nodes - nodes + 1, height
        return value

    def alias(self, event: Any, depth: int) -> Any:
        if event.anchor in self.open_anchors:
            self.refuse(event, f"alias *{event.anchor} is inside the value that it refers to")
        if event.anchor not in self.anchors:
            self.refuse(event, f"alias *{event.anchor} has no anchor &{event.anchor} before it")
        value, nodes, height = self.anchors[event.anchor]
        self.nodes += nodes
        self.aliased_nodes += nodes
        self.deepest = max(self.deepest, depth + height)
        if self.deepest > self.max_depth:
            self.refuse_depth(event)
        if self.aliased_nodes > self.max_aliased:
            self.refuse(
                event,
                f"aliases expand to more than {self.max_aliased:,} values; {ALIASED_VALUES.hint}",
            )
        return value

    def refuse_depth(self, event: Any) -> NoReturn:
        self.refuse(event, f"nested deeper than {self.max_depth} levels; {DOCUMENT_DEPTH.hint}")

    def repeated(self, event: Any, key: Any, line: int) -> None:
        """Refuse a duplicate key, or warn that it replaces the first one."""
        if not self.repeated_keys:
            self.refuse(event, f"duplicate key {key!r}, first in line {line}")
        here = _mark(event).line
        warn_once(
            logger,
            f"{self.origin}:{here}",
            "%s:%d: %r occurs again, first in line %d; the last one is used",
            self.origin,
            here,
            key,
            line,
        )

    def refuse(self, event: Any, problem: str) -> NoReturn:
        mark = event.start_mark
        raise FormatError(f"{self.origin}:{mark.line + 1}:{mark.column + 1}: {problem}")


def _mark(event: Any) -> Mark:
    return Mark(event.start_mark.line + 1, event.start_mark.column + 1)


def _explain(exc: yaml.MarkedYAMLError, origin: str) -> str:
    mark, context = exc.problem_mark or exc.context_mark, exc.context_mark
    position = f"{origin}:{mark.line + 1}:{mark.column + 1}" if mark else origin
    message = f"{position}: not valid YAML: {exc.problem}"
    if context and mark and context.line != mark.line:
        message += f", {exc.context} that starts in line {context.line + 1}"
    hints = [hint for part, hint in _HINTS.items() if part in message]
    return "; ".join([message, *hints])


def _find(character: str, text: Any, origin: str) -> str:
    before = text.partition(character)[0].split("\n")
    return f"{origin}:{len(before)}:{len(before[-1]) + 1}"


_PLAIN = re.compile(
    r"(?:[A-Za-z_/]|\.(?=[A-Za-z./]))(?:[A-Za-z0-9_./{}@+=%,()-]|[ :](?=[A-Za-z0-9_./]))*"
)
_RESERVED = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "..."))
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_UNSAFE = re.compile(r'["\\\x00-\x1f\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]')


def dump_yaml(data: Any) -> str:
    """Return `data` as YAML on which our reader, Megatron-Energon's and those of YAML 1.1 agree.

    Block style, keys in their order, no anchors. `data` is made of mappings, lists, tuples,
    text, numbers, booleans and None.

    Raises:
        TypeError: If it holds anything else.
        FormatError: If it holds text that UTF-8 cannot express.
    """
    return "\n".join(_lines(data)) + "\n"


def scalar_text(value: Any) -> str:
    """Return `value` as YAML text, quoted if any dialect would read it as another value.

    Raises:
        TypeError: If it is not a scalar.
        FormatError: If it is text that UTF-8 cannot express.
    """
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float_text(value)
    raise TypeError(f"cannot write {value!r} ({type(value).__name__}) as YAML")


def _float_text(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    mantissa, exponent, power = repr(value).partition("e")
    return mantissa + (".0" if exponent and "." not in mantissa else "") + exponent + power


def _text(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise FormatError(f"{value!r} cannot be written as UTF-8")
    if (
        _PLAIN.fullmatch(value)
        and isinstance(scalar(value), str)
        and value.lower() not in _RESERVED
    ):
        return value
    return f'"{_UNSAFE.sub(_escape, value)}"'


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return _ESCAPES.get(character) or f"\\u{ord(character):04x}"


def _lines(data: Any) -> Iterator[str]:
    if not _is_block(data):
        yield _flow(data)
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _attach(f"{scalar_text(key)}:", value)
    else:
        for value in data:
            yield from _item(value)


def _attach(head: str, value: Any) -> Iterator[str]:
    if _is_block(value):
        yield head
        yield from (f"  {line}" for line in _lines(value))
    else:
        yield f"{head} {_flow(value)}"


def _item(value: Any) -> Iterator[str]:
    if _is_block(value) and isinstance(value, Mapping):
        for position, line in enumerate(_lines(value)):
            yield f"  {line}" if position else f"- {line}"
    else:
        yield from _attach("-", value)


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > 0


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    return "[]" if isinstance(value, list | tuple) else scalar_text(value)
