"""`make docs` opens what it has built for whoever can see it, and for no one else."""

from __future__ import annotations

import io
import sys

import pytest

from docs.site.build import has_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "output", "opens"),
    [
        ({"DISPLAY": ":0"}, Terminal(), True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, Terminal(), True),
        ({"DISPLAY": ":0"}, io.StringIO(), False),
        ({"DISPLAY": ":0", "CI": "1"}, Terminal(), False),
        ({}, Terminal(), False),
    ],
)
def test_opens_a_browser_only_on_a_desktop(monkeypatch, environment, output, opens):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "stdout", output)
    assert has_display() == opens
