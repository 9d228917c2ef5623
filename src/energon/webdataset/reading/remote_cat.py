"""Write the bytes of an object to standard output: `python -m … URL START`.

For processes that were forked from one with connections, which they can neither use nor make.
"""

from __future__ import annotations

import os
import sys

from energon.errors import EnergonError
from energon.io.files import open_store


def main(url: str, start: str) -> int:
    """Write from byte `start` on; return the exit status."""
    store, key = open_store(url)
    try:
        for chunk in store.stream(key, int(start)):
            view = memoryview(chunk)
            while view:
                view = view[os.write(1, view) :]
    except BrokenPipeError:
        # Nobody wants the rest.
        return 0
    except EnergonError as error:
        os.write(2, f"{error}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    # The threads of the store are not waited for.
    os._exit(main(*sys.argv[1:]))
