"""Messages between parent and worker: all of one length, with file descriptors attached.

Anything longer than a message travels in shared memory, so neither side ever waits for the other
to read.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

_LAYOUT = struct.Struct("<IIQQQ")
_MAX_DESCRIPTORS = 4


class MessageKind(enum.IntEnum):
    """What a message says, and who sends it."""

    SETUP = 1
    """Parent: attached are the heartbeat page and what `processes.main.Setup` describes."""
    OPEN = 2
    """Parent: host the lanes described in the attachment; `generation` numbers this request."""
    FREE = 3
    """Parent: slot `slot` may be overwritten."""
    LEASED = 4
    """Parent: the content of `slot` has been received, but views of it are in use."""
    EVENTS = 5
    """Worker: `slot` holds events; their table occupies its bytes `start` to `stop`. A slot that is
    new or has grown is attached."""


class Message(NamedTuple):
    """One message; fields that do not apply are 0."""

    kind: int
    slot: int = 0
    generation: int = 0
    start: int = 0
    stop: int = 0
    descriptors: Sequence[int] = ()


def is_readable(
    channel: socket.socket | int, timeout_seconds: float, *others: socket.socket
) -> bool:
    """Return whether any of them has something to read, waiting for it up to a timeout.

    Unlike `select.select`, this works for descriptors with any number.
    """
    poll = select.poll()
    for each in (channel, *others):
        poll.register(each, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


def send(channel: socket.socket, message: Message) -> None:
    """Send `message`; attached descriptors stay open here.

    Raises:
        OSError: If the other side is gone.
    """
    *fields, descriptors = message
    data = _LAYOUT.pack(*fields)
    if descriptors:
        socket.send_fds(channel, [data], list(descriptors))
    else:
        channel.sendall(data)


def receive(channel: socket.socket) -> Message | None:
    """Return the next message, or None if the other side is gone.

    Raises:
        BlockingIOError: If there is none yet and `channel` does not block.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, _LAYOUT.size, _MAX_DESCRIPTORS)
    except ConnectionError:
        return None
    # Messages are far shorter than what a Unix socket sends as a whole: a partial one means that
    # the sender died.
    if len(data) < _LAYOUT.size:
        return None
    kind, slot, generation, start, stop = _LAYOUT.unpack(data)
    return Message(kind, slot, generation, start, stop, descriptors)
