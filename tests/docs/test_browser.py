"""The site in a browser, offline: its search finds answers, and pages fit into the window."""

from __future__ import annotations

import warnings

import pytest

from docs.site import build
from tests.servers.chromium import chromium
from tests.shared import made_once

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
    "slurm": "cluster",
    "kubernetes": "cluster",
    "qwen": "finetune_vlm",
    "whisper": "train_whisper",
    "huggingface processor": "packing",
    "restore_sample": "api/datasets_and_loaders",
}


WIDTHS = (400, 800, 1400, 1600)
PAGES = (
    *("index", "packing", "how_it_works", "finetune_vlm", "faq", "benchmarks", "migration"),
    *("api/index", "api/datasets_and_loaders", "api/pipelines_of_streams_energon_webdataset"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site, and return where it is, and a page of a browser."""
    folder = made_once(tmp_path_factory, "site", build_site)
    with chromium() as browser:
        yield folder / "html", browser.new_page()


def build_site(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "BUILD", folder)
        patch.setattr(build, "SOURCES", folder / "sources")
        with warnings.catch_warnings(action="ignore"):  # those of Sphinx about itself
            assert build.build() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items())
def test_the_first_result_answers_the_question(site, question, answer):
    folder, page = site
    page.goto(f"{(folder / 'search.html').as_uri()}?q={question.replace(' ', '+')}")
    page.wait_for_function("/finished|did not match/.test(document.body.innerText)")
    first = page.locator("#search-results li a").first
    assert first.get_attribute("href").partition(".html")[0] == answer


@pytest.mark.slow
def test_code_is_copied_without_prompts_and_output(site):
    folder, page = site
    page.goto((folder / "getting_started.html").as_uri())
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    block = page.locator(".highlight-console", has_text="energon lint images")
    block.locator("button.copy").click()
    assert page.evaluate("window.copied") == "energon lint images"


@pytest.mark.slow
def test_methods_have_anchors_and_linked_types(site):
    folder, page = site
    page.goto((folder / "api/datasets_and_loaders.html").as_uri())
    assert page.locator("[id='energon.SavableDataLoader.save_state_rank']").count() == 1
    config = page.locator("[id='energon.get_train_dataset'] a[href='#energon.WorkerConfig']")
    assert config.count() == 1


@pytest.mark.slow
def test_pages_are_no_wider_than_the_window(site):
    folder, page = site
    wider = {}
    for name in PAGES:
        page.goto((folder / f"{name}.html").as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            found = page.evaluate("document.documentElement.scrollWidth")
            if found > width:
                wider[name, width] = found
    assert not wider
