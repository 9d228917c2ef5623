"""The names of energon under the import path that programs written for Megatron-Energon use.

Nothing is defined here. The modules below this package have the names that those of
Megatron-Energon have; `energon.compat.megatron.names` is the table of all of them.
"""

from __future__ import annotations

import sys

from energon.compat.megatron.finder import install

install(sys.modules[__name__])
