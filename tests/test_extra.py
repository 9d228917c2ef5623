from __future__ import annotations

import sys

import pytest

import energon.webdataset as wds
from energon.decode.values import decode_pth, encode_part
from energon.errors import MissingExtraError, needs_extra


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


def encode_pth():
    encode_part("pth", {"a": 1})


def load_pth():
    decode_pth(b"", trusted=True)


def decode_video():
    wds.torch_video("mp4", b"video")


def decode_audio():
    wds.torch_audio("wav", b"audio")


@pytest.mark.parametrize("use", [encode_pth, load_pth, decode_video, decode_audio])
def test_what_needs_torch_says_so_where_it_is_not_installed(use, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"torch; pip install 'energon-loader\[torch\]'$"):
        use()
