"""The logger of the package."""

from __future__ import annotations

import logging

log = logging.getLogger("energon")
