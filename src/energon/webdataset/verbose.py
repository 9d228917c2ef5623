"""Lines that a user asks for by a variable of the environment, wherever logging goes."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("energon")


def tell(variable: str, message: str, *args: object) -> None:
    """Log a line; if the environment asks for it, show it even where logging is not set up.

    Args:
        variable: Asks for it, unless it is unset, empty or 0.
        message: The line, and `args` to go into it.
        args: See `message`.
    """
    if os.environ.get(variable, "0") in ("", "0"):
        logger.debug(message, *args)
    elif logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message, *args)
    else:
        sys.stderr.write(f"{message % args}\n")
