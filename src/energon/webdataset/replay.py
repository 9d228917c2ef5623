"""Get items again without keeping them: a position of the source, and a number.

A stage that holds items (a shuffle buffer, a batch that it takes apart) may not save them, as
they can be anything and of any size. It saves where its source was before the oldest of them,
and which of the items that came since it still has. Restoring takes these from the source again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from energon.errors import StateError
from energon.webdataset.stage import State, load_state, state_of, unpack

NOTE_ITEMS = 256
"""A position of the source is noted before each so many items."""


class Replay:
    """The items of a source, which can be taken again from any that is still of use.

    Args:
        source: What to iterate over.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.count = 0
        """How many items have been taken."""
        self.oldest = 0
        """Number of the oldest item that may be needed again; the user moves it on."""
        self._source = source
        self._notes: deque[tuple[int, State]] = deque()
        self._unsavable: StateError | None = None

    def __iter__(self) -> Iterator[Any]:
        self._note()
        for item in self._source:
            self.count += 1
            yield item
            if not self.count % NOTE_ITEMS:
                self._note()

    def state_dict(self) -> State:
        """Return how to get at item number `oldest` again.

        Raises:
            StateError: If the source cannot be saved.
        """
        if self._unsavable is not None:
            raise self._unsavable
        if not self._notes:
            return {"source": state_of(self._source), "skip": 0}
        number, state = next(note for note in reversed(self._notes) if note[0] <= self.oldest)
        return {"source": state, "skip": self.oldest - number}

    def load_state_dict(self, state: State) -> None:
        """Go to a saved position; counting starts at 0 there."""
        source, skip = unpack(state, "source", "skip")
        load_state(self._source, source)
        items = iter(self._source)
        for number in range(skip):
            if next(items, self) is self:
                raise StateError(
                    f"the data has ended {skip - number} items before the saved position; has it "
                    "changed since?"
                )

    def _note(self) -> None:
        if self._unsavable is not None:
            return
        try:
            self._notes.append((self.count, state_of(self._source)))
        except StateError as error:
            # Only who saves has to know.
            self._unsavable = error
            return
        while len(self._notes) > 1 and self._notes[1][0] <= self.oldest:
            self._notes.popleft()
