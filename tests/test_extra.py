from __future__ import annotations

import re
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_the_demo_installs_fewer_than_25_packages():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    extras = re.search(r"\.ci/install ([\w,-]*torch[\w,-]*)", makefile)
    assert extras is not None
    found: set[tuple[str, tuple[str, ...]]] = set()
    todo = [("energon-loader", tuple(extras[1].split(",")))]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) not in found:
            found.add((name, wanted))
            for line in requires(name) or ():
                each = Requirement(line)
                places = [{"extra": extra} for extra in wanted or ("",)]
                if each.marker is None or any(map(each.marker.evaluate, places)):
                    todo.append((canonicalize_name(each.name), tuple(sorted(each.extras))))
    others = {name for name, _ in found} - {"energon-loader"}
    # Builds of torch that bring CUDA are not what `make demo` installs.
    assert len({name for name in others if not name.startswith(("nvidia", "cuda", "triton"))}) < 25
