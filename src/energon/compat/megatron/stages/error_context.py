"""Tolerate failures in code of one's own as hooks do: for stages and tools of users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from energon.errors import SYSTEM_EXCEPTIONS, FatalSampleError, SkipSample
from energon.samples.crude import get_source_info
from energon.stages.hook import DEFAULT_TOLERANCE, ErrorHandler, describe_sources, log_exception


class ErrorContext:
    """Hands failures to a handler until there are too many of them in a row.

    Args:
        name: How messages call what may fail.
        handler: Called as `handler(exception, sample, sources)` for each tolerated failure.
        tolerance: How many failures in a row end the run; 0 never ends it.

    Example:
        >>> context = ErrorContext("parse", lambda error, sample, sources: print(error))
        >>> for text in ("1", "one"):
        ...     with context.handle_errors(text):
        ...         print(int(text))
        1
        invalid literal for int() with base 10: 'one'
    """

    def __init__(
        self, name: str, handler: ErrorHandler = log_exception, tolerance: int = DEFAULT_TOLERANCE
    ) -> None:
        self.name = name
        self.handler = handler
        self.tolerance = tolerance
        self._failed_in_a_row = 0

    def reset(self) -> None:
        """Forget the failures so far."""
        self._failed_in_a_row = 0

    @contextmanager
    def handle_errors(self, sample: Any) -> Iterator[None]:
        """Tolerate what the block raises for `sample`; `SkipSample` is no failure.

        Raises:
            FatalSampleError: If it is one failure too many, or one that ends every run.
        """
        try:
            yield
        except SkipSample:
            return
        except SYSTEM_EXCEPTIONS as error:
            raise FatalSampleError(f"{self._where(sample)}: {_cause(error)}") from error
        except Exception as error:
            self._failed_in_a_row += 1
            if self.tolerance and self._failed_in_a_row >= self.tolerance:
                raise FatalSampleError(
                    f"{self._where(sample)}: {_cause(error)}; that makes {self._failed_in_a_row} "
                    "failures in a row, the tolerance"
                ) from error
            self.handler(error, sample, get_source_info(sample))
        else:
            self.reset()

    def _where(self, sample: Any) -> str:
        return f"{self.name} failed on {describe_sources(get_source_info(sample))}"


@contextmanager
def handle_restore_errors(error_handler: ErrorHandler, sample: Any) -> Iterator[None]:
    """Hand what the block raises to `error_handler`, unless it ends every run.

    Raises:
        FatalSampleError: If it does.
    """
    try:
        yield
    except SYSTEM_EXCEPTIONS as error:
        where = describe_sources(get_source_info(sample))
        raise FatalSampleError(f"{where}: {_cause(error)}") from error
    except Exception as error:
        error_handler(error, sample, get_source_info(sample))


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
