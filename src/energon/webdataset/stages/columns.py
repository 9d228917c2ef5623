"""Process the samples of a batch column by column, where only speed tells the difference.

A batch takes samples from its source, and the stages in between decode them and choose fields.
Done by fields instead of samples, it takes half the time: what a field becomes is looked up once
in a batch, functions are applied by `map`, and no dict or tuple is made of what the batch takes
apart again. Only functions of our own are applied this way, which do nothing but return a value;
and only if all samples have the same fields and none fails. Otherwise the samples of the batch
go through the stages one by one, which drops and reports what fails.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from energon.decode.documents import decode_json, quick_json_parser
from energon.decode.sample_decoder import DECODERS
from energon.formats.tar.sample_parser import SampleRow, StreamSample
from energon.limits import DOCUMENT_BYTES, PART_DEPTH
from energon.webdataset.stages.base import ask_for_rows, take_function
from energon.webdataset.utils import identity


class JsonColumn(list[Any]):
    """A column of decoded JSON, which pickle can take as a whole: it becomes a plain list.

    As nobody has seen the values, they are of the plain types that JSON has. marshal copies these
    exactly, and in less time than pickle.
    """

    def __reduce__(self) -> Any:
        return marshal.loads, (marshal.dumps(list(self)),)


@dataclass(frozen=True, eq=False)
class SampleColumns:
    """The fields of N samples, which are dicts or tuples.

    Args:
        names: The keys of the dicts; None for tuples.
        columns: The N values of each field.
    """

    names: tuple[Any, ...] | None
    columns: Sequence[Sequence[Any]]

    def __len__(self) -> int:
        return len(self.columns[0])

    def rows(self) -> list[Any]:
        """Return the samples."""
        rows = zip(*self.columns, strict=True)
        return list(rows if self.names is None else (dict(self._pairs(row)) for row in rows))

    def collated(self, collate: Callable[[list[Any]], Any], sends: bool = False) -> Any:
        """Return a dict or a tuple of columns, each the result of a function.

        Args:
            collate: The function.
            sends: Whether the result is to be pickled, and may hold a `JsonColumn`.
        """
        columns = [collate(list(column)) for column in self.columns]
        if sends:
            origins = list(map(id, self.columns))
            for at, column in enumerate(self.columns):
                # Columns of the same values stay columns of the same values.
                is_only = type(column) is JsonColumn and origins.count(id(column)) == 1
                if is_only and type(columns[at]) is list:
                    columns[at] = JsonColumn(columns[at])
        return tuple(columns) if self.names is None else dict(self._pairs(columns))

    def _pairs(self, values: Any) -> Iterator[tuple[Any, Any]]:
        return zip(self.names or (), values, strict=True)


def _decode_each(decode: Callable[[bytes], Any], column: Sequence[bytes]) -> list[Any]:
    return list(map(decode, column))


def _decode_json(column: Sequence[bytes]) -> JsonColumn:
    # No text has more levels than bytes, so the limits are looked up once for small ones.
    if max(map(len, column)) <= min(PART_DEPTH.value, DOCUMENT_BYTES.value):
        with suppress(Exception):
            return JsonColumn(map(quick_json_parser(), column))
    return JsonColumn(map(decode_json, column))


COLUMN_DECODERS: dict[Any, Callable[[Sequence[bytes]], Sequence[Any]]] = {
    **{decode: partial(_decode_each, decode) for decode in (DECODERS["txt"], DECODERS["cls"])},
    decode_json: _decode_json,
    identity: identity,
}
"""Functions that decode a column of fields, by those that decode one field.

All are quick, and their results are not much larger than the data: of a batch, all exist at once.
"""

OnColumns = Callable[[SampleColumns], SampleColumns | None]
"""Changes all samples at once; None if they, or the data in them, need to be seen one by one."""


class ColumnReader:
    """Takes samples from a source in lists, through functions that change all of them at once.

    Args:
        source: Yields samples.
        functions: Applied one after the other.
        one_by_one: Returns what stages that do the same make of samples one by one.
        has_stopped: Returns whether one of these stages has ended, no matter what follows.
        owns_source: Whether nothing else takes from the source, which may then give rows.
    """

    def __init__(
        self,
        source: Iterator[Any],
        functions: Sequence[OnColumns],
        one_by_one: Callable[[Iterator[Any]], Iterator[Any]],
        *,
        has_stopped: Callable[[], bool],
        owns_source: bool,
    ) -> None:
        self._has_rows = owns_source and ask_for_rows(source)
        self._take = take_function(source)
        self._functions = functions
        self._has_stopped = has_stopped
        self._held: deque[Any] = deque()
        self._error: Exception | None = None
        self._singles = one_by_one(self._held_first())

    def take(self, count: int) -> SampleColumns | list[Any]:
        """Return the next `count` samples, fewer only at the end."""
        samples: list[Any] = []
        if self._has_stopped():
            return samples
        try:
            self._take(samples, count)
        except Exception as error:
            # A sample before it may fail, too, or end a stage.
            self._error = error
        else:
            if not samples:
                return samples
            table = self._changed(samples)
            if table is not None:
                return table
            if not self._functions:
                return self._as_samples(samples)
        self._held.extend(self._as_samples(samples))
        del samples
        return list(islice(self._singles, count))

    def _changed(self, samples: list[Any]) -> SampleColumns | None:
        table = self._table(samples)
        try:
            for function in self._functions:
                if table is None:
                    break
                table = function(table)
        except Exception:
            # One by one, the sample that fails is named, and dropped or raised.
            return None
        return table

    def _held_first(self) -> Iterator[Any]:
        while True:
            if not self._held:
                if self._error is not None:
                    raise self._error
                more: list[Any] = []
                self._take(more, 1)
                if not more:
                    return
                self._held.extend(self._as_samples(more))
            yield self._held.popleft()

    def _table(self, samples: list[Any]) -> SampleColumns | None:
        """Return the columns of samples with the same fields in the same order, or None.

        Rows that differ in their fields become samples in the list.
        """
        kinds = set(map(type, samples))
        if self._has_rows and tuple in kinds:
            if len(kinds) == 1:
                names, *columns = zip(*samples, strict=False)
                if names.count(names[0]) == len(names):
                    return SampleColumns(names[0], columns)
            samples[:] = self._as_samples(samples)  # once: the stages may get them, too
        elif kinds != {dict}:
            return None
        names = tuple(samples[0])
        # No dict has a name twice, so the names of all can be cut in no other place.
        if not names or list(chain.from_iterable(samples)) != [*names] * len(samples):
            return None
        return SampleColumns(names, list(zip(*map(dict.values, samples), strict=True)))

    def _as_samples(self, samples: list[Any]) -> list[Any]:
        return list(map(_as_sample, samples)) if self._has_rows else samples


def _as_sample(sample: StreamSample | SampleRow) -> StreamSample:
    return sample if isinstance(sample, dict) else dict(zip(sample[0], sample[1:], strict=True))
