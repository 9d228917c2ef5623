"""Get items again without keeping them: a position of the source, and a number.

A stage that holds items (a shuffle buffer, a batch that it takes apart) may not save them, as
they can be anything and of any size. It saves where its source was before the oldest of them,
and which of the items that came since it still has. Restoring takes these from the source again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from energon.errors import StateError
from energon.webdataset.stages.base import State, load_state, state_of, unpack

NOTE_ITEMS = 256
"""A position of the source is noted before each so many items."""


class ReplayLog:
    """Positions of a source, by the number of the item that comes next there.

    Args:
        source: Whose positions to note.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._notes: deque[tuple[int, State]] = deque()
        self._unsavable: StateError | None = None

    def note(self, number: int, oldest: Callable[[], int]) -> None:
        """Note the position before item `number`, unless the last note is not far.

        Args:
            number: Number of the item that comes next.
            oldest: Gives the number of the first item that may be needed again.
        """
        notes = self._notes
        if self._unsavable is not None or (notes and number - notes[-1][0] < NOTE_ITEMS):
            return
        try:
            notes.append((number, state_of(self._source)))
        except StateError as error:
            # Only who saves has to know.
            self._unsavable = error
            return
        needed = oldest()
        while len(notes) > 1 and notes[1][0] <= needed:
            notes.popleft()

    def state_at(self, number: int) -> State:
        """Return how to get at item `number` again, which was not taken before `oldest`.

        Raises:
            StateError: If the source cannot be saved.
        """
        if self._unsavable is not None:
            raise self._unsavable
        if not self._notes:
            return {"source": state_of(self._source), "skip": number}
        noted, state = next(note for note in reversed(self._notes) if note[0] <= number)
        return {"source": state, "skip": number - noted}

    def load_state_dict(self, state: State) -> None:
        """Bring the source to a saved position; items are counted from 0 there."""
        source, skip = unpack(state, "source", "skip")
        load_state(self._source, source)
        passed = sum(1 for _ in islice(iter(self._source), skip))
        if passed < skip:
            raise StateError(
                f"the data has ended {skip - passed} items before the saved position; has it "
                "changed since?"
            )


class Replay:
    """The items of a source one by one, of which the last may be needed again.

    Args:
        source: What to iterate over.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.oldest = 0
        """Number of the oldest item that may be needed again; the user moves it on."""
        self._source = source
        self._log = ReplayLog(source)
        self._count = 0

    def __iter__(self) -> Iterator[Any]:
        self._log.note(0, int)
        for item in self._source:
            self.oldest = self._count
            self._count += 1
            yield item
            self.oldest = self._count
            if not self._count % NOTE_ITEMS:
                self._log.note(self._count, lambda: self._count)

    def state_dict(self) -> State:
        """Return how to get at item number `oldest` again.

        Raises:
            StateError: If the source cannot be saved.
        """
        return self._log.state_at(self.oldest)

    def load_state_dict(self, state: State) -> None:
        """Go to a saved position."""
        self._log.load_state_dict(state)
