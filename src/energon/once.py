"""What one of the processes of a program does for all of them."""

from __future__ import annotations

import errno
import os
import socket
from hashlib import blake2b


def is_first(what: str) -> bool:
    """Return whether this is the first call of the program, its workers included.

    A name is claimed that the system forgets when the process ends. Where there are no such
    names, each process takes itself for the first.

    Args:
        what: Names what is to be done once.
    """
    # Workers belong to the process group of the program that has started them.
    name = f"energon {os.getuid()} {os.getpgrp()} {what}".encode("utf-8", "surrogateescape")
    try:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        return True
    try:
        claim.bind(b"\0" + blake2b(name, digest_size=24).hexdigest().encode())
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    claim.detach()  # stays open, so that nobody else gets the name
    return True
