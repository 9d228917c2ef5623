"""Words for messages: what may be printed, how many there are, and what was probably meant.

Some warnings are given once, or once in a while, whichever worker has cause to (`warn_once`), and
some of these end with how long the trainer has waited, which only its own process knows.

Control characters, marks that turn the direction of text, and bytes that are not text are written
as escapes, in messages of errors, in log records and in what commands print. Passwords and
signatures of addresses are left out of errors and log records (`redact_text`) of any module.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import time
from collections.abc import Iterable
from heapq import nlargest
from itertools import islice
from typing import Any, Protocol
from weakref import WeakSet

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def escape_text(text: str) -> str:
    r"""Return text of several lines without characters that terminals obey.

    Example:
        >>> print(escape_text("one\ntwo\x1b[2J\udcff"))
        one
        two\x1b[2J\xff
    """
    return text if text.isprintable() else _UNSAFE.sub(lambda match: _escape(match[0]), text)


def escape_line(text: str) -> str:
    r"""Return text that is to stay on one line, see `escape_text`.

    Example:
        >>> print(escape_line("a\n1.txt"))
        a\n1.txt
    """
    return escape_text(text).replace("\n", "\\n").replace("\t", "\\t")


def format_bytes(count: float) -> str:
    """Return a number of bytes with a unit.

    Example:
        >>> [format_bytes(count) for count in (0, 999, 1500, 70_000_000)]
        ['0 B', '999 B', '1.5 kB', '70.0 MB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def shell_word(value: object) -> str:
    """Return a path or address as a shell takes it, for commands that messages suggest.

    Example:
        >>> print(f"energon prepare {shell_word('my photos')}")
        energon prepare 'my photos'
    """
    return shlex.quote(escape_line(str(value)))


_URL_START = re.compile(r"([A-Za-z0-9+.-]{0,32})://")
_HOST_AND_PORT = re.compile(r"([^:@]*|\[[^]@]*\])(:\d+)?")
# In text, a URL ends at white space, which a password may contain all the same: USER:PASS WORD@.
# It does not begin with it, nor is it a number: "s3://bucket: no x@2.jpg", "http://host:80 or a@b".
_USER_IN_TEXT = re.compile(r"([^\s:/?#@]*:(?!\d*\s)[^/?#\n]*@)?")
_WORD = re.compile(r"\S*")
_AFTER_URL = "'\"`,;:.)]}>"
_QUERY_IN_TEXT = re.compile(r"(?<=\?)[^\s?]*=\S*")
_MAX_QUOTED = 10_000
"""Characters of a URL in quotes; without a limit, quotes that never close take quadratic time."""


def redact_text(text: str, *, is_address: bool = False) -> str:
    """Return text without the passwords and signatures of the URLs in it.

    User name and password end at the last `@` before the path. Of a URL whose user name and
    password cannot be told from its path, only the scheme is left.

    Args:
        text: A message, or one address.
        is_address: Whether it is one address, which may contain spaces and quotes.

    Example:
        >>> redact_text("GET https://me:p@ss@host/x?sig=secret failed, see s3://id:key@bucket")
        'GET https://***@host/x?*** failed, see s3://***@bucket'
    """
    pieces, done = [], 0
    while url := _URL_START.search(text, done):
        stop = len(text)
        if not is_address or url.start():
            stop = _end_of_url(text, url)
        # Of a path with spaces, only the first word has been taken as part of the URL.
        before = text[done : url.end()]
        pieces += [_QUERY_IN_TEXT.sub("***", before) if done else before]
        pieces += [_redact_url(url[1].lower(), text[url.end() : stop])]
        done = stop
    rest = text[done:]
    return "".join([*pieces, _QUERY_IN_TEXT.sub("***", rest) if done else rest])


def _end_of_url(text: str, url: re.Match[str]) -> int:
    """Return where a URL in a text ends, given the match of its scheme."""
    quote, user = text[url.start() - 1 : url.start()], _USER_IN_TEXT.match(text, url.end())
    start = user.end() if user else url.end()
    if quote and quote in "'\"`":
        closing = re.compile(rf"{quote}(?=[,;:.)\]}}>]*(?:\s|$))")
        if end := closing.search(text, start, start + _MAX_QUOTED):
            return end.start()
    word = _WORD.match(text, start)
    return start + len(word[0].rstrip(_AFTER_URL)) if word else start


def _redact_url(scheme: str, rest: str) -> str:
    """Return the part of a URL after `scheme://`, without secrets."""
    if scheme == "dss":
        return rest  # dss://DATASET@VERSION/PATH
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    tail = rest[len(authority) :]
    _, at, host = authority.rpartition("@")
    if at:
        authority = f"***@{host}"
    elif "@" in tail and not _HOST_AND_PORT.fullmatch(authority):
        return "***"  # USER:PASS/WORD@HOST
    path, mark, query = tail.partition("?")
    is_query = scheme in ("http", "https") or "=" in query  # else a pattern: s3://bucket/a?.tar
    return f"{authority}{path}{mark}{'***' if query and is_query else query}"


def escape_record(record: logging.LogRecord) -> bool:
    """Escape what a log record says, and redact it; a filter that lets every record pass."""
    arguments = record.args
    if isinstance(arguments, tuple):
        record.args = tuple(map(_safe_argument, arguments))
    try:
        text = record.getMessage()
    except (TypeError, ValueError, KeyError):
        return True  # the handler of the record reports arguments that do not fit
    shown = escape_text(redact_text(text))
    if shown != text:
        record.msg, record.args = shown, ()
    return True


class Lines:
    """Text that a log record has as several lines, such as a traceback.

    All other text stays on one line: names from data are not to look like records of their own.

    Args:
        text: The lines.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


def _safe_argument(argument: object) -> object:
    if not isinstance(argument, str | os.PathLike) or str(argument).isprintable():
        return argument
    return escape_line(str(argument))


def _escape(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:
        return f"\\x{number - 0xDC00:02x}"  # a byte that is not text
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


# Here, so that it is done before anything that logs has been imported.
logging.getLogger("energon").addFilter(escape_record)


_HISSING = ("s", "x", "ch", "sh")


def counted(number: int, one: str, many: str | None = None, *, grouped: bool = False) -> str:
    """Return a number of things in words.

    Args:
        number: How many.
        one: What one of them is called.
        many: What several are called, if that is not `one` with an s.
        grouped: Whether thousands are set apart by commas.

    Example:
        >>> counted(1, "shard"), counted(2, "batch"), counted(0, "shard is", "shards are")
        ('1 shard', '2 batches', '0 shards are')
        >>> counted(1234567, "sample", grouped=True)
        '1,234,567 samples'
    """
    if many is None:
        many = one + ("es" if one.endswith(_HISSING) else "s")
    return f"{number:{',' if grouped else ''}} {one if number == 1 else many}"


def short_number(value: float) -> str:
    """Return a number with three significant digits, or all digits before the decimal point.

    Example:
        >>> short_number(2073600), short_number(0.12345), short_number(3.0)
        ('2,073,600', '0.123', '3')
    """
    if abs(value) >= 1_000_000_000:
        return f"{value:.3g}"
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def type_in_words(value: object) -> str:
    """Return the type of a value in words, as in "is an int".

    Example:
        >>> type_in_words("text"), type_in_words([].append), type_in_words(None)
        ('a str', 'a builtin_function_or_method', 'None')
    """
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' or name == 'ndarray' else 'a'} {name}"


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an exception; `assert` without a text has no message."""
    name, message = type(error).__name__, cut_text(str(error))
    return f"{name}: {message}" if message else name


def cut_text(text: str, most: int = 4000) -> str:
    """Return text without its middle if it is long: exceptions may quote a whole sample.

    Example:
        >>> cut_text("0123456789" * 3, 16)
        '01234567 … 14 characters … 23456789'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def bytes_in_words(data: bytes | bytearray | memoryview, most: int = 16) -> str:
    """Return how many bytes there are, and the first of them.

    Example:
        >>> bytes_in_words(b""), bytes_in_words(b"{"), bytes_in_words(b"GIF89a", 3)
        ('0 bytes', "1 byte, b'{'", "6 bytes that begin with b'GIF'")
    """
    size, begin = counted(len(data), "byte"), bytes(data[:most])
    if len(data) > most:
        return f"{size} that begin with {begin!r}"
    return f"{size}, {begin!r}" if begin else size


MAX_CHARACTERS = 100
"""Of a name that are compared: documents of strangers may have names of megabytes."""
MAX_CHECKED_NAMES = 10_000
"""Names that are checked."""
MAX_CANDIDATES = 10
"""Names that are compared letter by letter, which takes the cube of their length."""


def list_names(names: Iterable[object], most: int = 10) -> str:
    """Return names in quotes; of many, only the first.

    Example:
        >>> list_names(["a", "b", "c"], 2)
        "'a', 'b', …"
    """
    listed = [repr(str(name)) for name in islice(names, most + 1)]
    return ", ".join([*listed[:most], *(["…"] if len(listed) > most else [])])


def nearest(name: object, names: Iterable[object], cutoff: float = 0.6) -> str | None:
    """Return the closest name to one that does not exist; None if none is close.

    Takes a second at most, whatever the names are.

    Args:
        name: The name that does not exist.
        names: The names that could have been meant.
        cutoff: How close it has to be, from 0 to 1, which is the same.

    Example:
        >>> nearest("wieght", ["path", "weight", "subset"]), nearest("x", ["path"])
        ('weight', None)
    """
    from difflib import SequenceMatcher

    requested = str(name)[:MAX_CHARACTERS]
    matcher: SequenceMatcher[str] = SequenceMatcher(None, "", requested)
    scored = []
    for each in islice(names, MAX_CHECKED_NAMES):
        candidate = str(each)
        matcher.set_seq1(candidate[:MAX_CHARACTERS])
        # These two look at lengths and at how often each letter is there.
        if matcher.real_quick_ratio() >= cutoff and (score := matcher.quick_ratio()) >= cutoff:
            same = _same(requested, candidate) + _same(requested[::-1], candidate[::-1])
            scored.append((score, same, candidate))
    ratios = []
    for *_, candidate in nlargest(MAX_CANDIDATES, scored):
        matcher.set_seq1(candidate[:MAX_CHARACTERS])
        ratios.append((matcher.ratio(), candidate))
    ratio, closest = max(ratios, default=(0.0, ""))
    return closest if ratio >= cutoff else None


def _same(a: str, b: str) -> int:
    """Return how many letters two names have in common at their beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


_EARLY = 0.9
"""Clocks of workers are not read at quite the same moment."""
_given: dict[str, float] = {}


def warn_once(
    logger: logging.Logger, what: str, message: str, *args: Any, level: int = logging.WARNING
) -> None:
    """Log a warning, unless this process or a worker of it has done so.

    Args:
        logger: To whom.
        what: Tells this warning from others.
        message: Its text, and `args` to go into it.
        args: See `message`.
        level: The level of the message.
    """
    if _is_due(what, math.inf):
        logger.log(level, message, *args, extra={"energon_once": what})


def warn_every(
    seconds: float,
    logger: logging.Logger,
    what: str,
    message: str,
    *args: Any,
    delays_batches: bool = False,
) -> bool:
    """Log a warning at most once in this many seconds, all workers together; return whether it was.

    Args:
        seconds: How long to keep silent after the last time.
        logger: See `warn_once`.
        what: See `warn_once`.
        message: See `warn_once`.
        args: See `warn_once`.
        delays_batches: Whether to add how long the trainer has waited for its batch.
    """
    if not _is_due(what, seconds):
        return False
    extra = {**by_one_worker(what, seconds), "energon_delays": delays_batches}
    logger.warning(message, *args, extra=extra)
    return True


def by_one_worker(what: str, seconds: float) -> dict[str, Any]:
    """Return `extra` fields that deduplicate a record across workers.

    Args:
        what: Tells this record from others.
        seconds: For how long after it the others are not heard.
    """
    return {"energon_once": what, "energon_every": seconds}


class Trainer(Protocol):
    """The consumer of the batches of a loader in this process."""

    waiting_since: float | None
    """When it asked for the batch that it waits for, by `time.perf_counter`; None if it does not
    wait."""


trainers: WeakSet[Trainer] = WeakSet()
"""Those of this process. Workers that are processes have none: what they log is completed where
the trainer is."""
# Workers may be forks of the training process.
os.register_at_fork(after_in_child=trainers.clear)


def tell_wait(record: logging.LogRecord) -> bool:
    """Add how long the trainer has waited, where that matters; a filter that lets all pass."""
    if getattr(record, "energon_delays", False) and trainers:
        waiting = [each.waiting_since for each in list(trainers)]
        since = min((each for each in waiting if each is not None), default=None)
        wait = "is not waiting for a batch"
        if since is not None:
            wait = f"has waited {time.perf_counter() - since:.1f} s for its batch"
        record.msg, record.args = f"{record.getMessage()}; the trainer {wait}", ()
        record.energon_delays = False  # nothing to add where it arrives
    return True


logging.getLogger("energon").addFilter(tell_wait)


def is_repeated(record: logging.LogRecord) -> bool:
    """Return whether a record that comes from a worker is a warning that was given already."""
    what = getattr(record, "energon_once", None)
    seconds = getattr(record, "energon_every", math.inf)
    # It may have waited in a socket while the trainer was busy: what counts is when it was made.
    age = max(0.0, time.time() - record.created)
    return what is not None and not _is_due(what, _EARLY * seconds, age)


def forget_given() -> None:
    """Let warnings be given again: this process works for another training program from now on."""
    _given.clear()


def _is_due(what: str, seconds: float, age: float = 0.0) -> bool:
    made_at = time.monotonic() - age
    due = what not in _given or made_at - _given[what] >= seconds
    if due:
        _given[what] = made_at
    return due
