"""Wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait as long as it takes; the time limit of the test ends what never comes."""
    while not condition():
        time.sleep(0.01)
