"""What `make demo` says in the end; that it runs is checked by CI, and its data by the docs."""

from __future__ import annotations

import pytest

from tests.docs.conftest import load_demo


@pytest.mark.parametrize(
    ("cores", "load", "why"),
    [
        (1, 1.0, "there is one core"),
        (2, 7.3, "other programs use the 2 cores as well, the load is 7.3"),
        (2, 2.0, "the 2 cores do not work independently"),
    ],
)
def test_workers_that_gain_little_are_explained(cores, load, why):
    said = load_demo().why_workers_gain_little(0.94, cores, load)
    assert said.startswith(f"Workers make it 0.9 times as fast here: {why}")


@pytest.mark.parametrize(("with_workers", "is_due"), [(90, True), (115, True), (190, False)])
def test_the_explanation_is_printed_whenever_it_is_due(with_workers, is_due):
    demo = load_demo()
    with demo.console.capture() as printed:
        demo.report({0: 100.0, 2: with_workers})
    assert f"2 workers: {with_workers} photos/s" in printed.get()
    assert ("Workers make it" in printed.get()) == is_due
