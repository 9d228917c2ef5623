"""The fixtures of the tests of energon that these tests use."""

from __future__ import annotations

from tests.conftest import moto_port, quick_retries, s3  # noqa: F401  # found by their names
