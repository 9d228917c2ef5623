"""The search of the site finds the page that answers a question, offline."""

from __future__ import annotations

import warnings

import pytest

from docs.site import build
from tests.servers.chromium import chromium

QUESTIONS = {
    "resume": "save_and_resume",
    "resume other ranks": "save_and_resume",
    "shuffle": "blend",
    "packing": "packing",
    "get_train_dataset": "api/datasets_and_loaders",
    "ShardWriter": "api/writing_and_storage",
    "s3": "storage",
    "install": "getting_started",
    "out of memory": "operate",
    "corrupt sample": "errors",
    "migrate from Megatron-Energon": "migration",
    "parquet": "kinds",
    "lightning": "trainers",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return what finds the pages for a question, the best first."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, chromium() as browser:
        patch.setattr(build, "BUILD", folder)
        patch.setattr(build, "SOURCES", folder / "sources")
        with warnings.catch_warnings(action="ignore"):  # those of Sphinx about itself
            assert build.build() == 0
        page = browser.new_page()

        def find(question):
            address = (folder / "html/search.html").as_uri()
            page.goto(f"{address}?q={question.replace(' ', '+')}")
            page.wait_for_function("/finished|did not match/.test(document.body.innerText)")
            links = page.locator("#search-results li a")
            return [link.get_attribute("href").partition(".html")[0] for link in links.all()]

        yield find


@pytest.mark.slow
@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items())
def test_the_first_result_answers_the_question(results, question, answer):
    assert results(question)[:1] == [answer]
