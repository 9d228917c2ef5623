"""Write the bytes of an object to standard output: `python -m … URL START`.

For processes forked from one with open connections, which can neither use these nor open new ones.
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
        # The reader has closed the pipe.
        return 0
    except EnergonError as error:
        os.write(2, f"{error}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    # Does not wait for the threads of the store.
    os._exit(main(*sys.argv[1:]))
