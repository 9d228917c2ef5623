from __future__ import annotations

import pytest

from energon.errors import MissingExtraError
from energon.extra import needs_extra


def test_says_what_to_install_for_what():
    with (
        pytest.raises(
            MissingExtraError, match=r"^tea needs water; pip install 'energon-loader\[tea\]'$"
        ) as found,
        needs_extra("tea", "tea needs water"),
    ):
        import water_that_nobody_has  # noqa: F401
    assert isinstance(found.value.__cause__, ModuleNotFoundError)


def test_other_errors_pass():
    with pytest.raises(ValueError, match="hot"), needs_extra("tea", "tea needs water"):
        raise ValueError("hot")
