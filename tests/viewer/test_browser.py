"""The pages of `energon view` in Chromium, as people use them.

`SCREENSHOTS=1 pytest tests/viewer/test_browser.py` draws the images of the documentation again.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from energon import DefaultTaskEncoder, SampleDecoder, stateless
from energon.inspect.where import Where
from energon.packing import pack_sequences
from energon.prepare.dataset import prepare_dataset
from energon.viewer import shown
from energon.viewer.app import make_app
from energon.viewer.notes import Notes
from energon.viewer.shown import Shown
from tests.datasets import make_crude, write_shard
from tests.servers.chromium import chromium, served
from tests.servers.process import TOOLS, lack
from tests.viewer.showcase import make_showcase

IMAGES = Path(__file__).parents[2] / "docs/images"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:uvicorn"),
]


class Crops(DefaultTaskEncoder):
    """Cuts a random square out of each image, and packs texts by their letters."""

    decoder = SampleDecoder(image_decode="rgb8")

    @stateless
    def encode_sample(self, sample):
        image = sample.get("jpg")
        if image is None:
            image = np.zeros((240, 240, 3), np.uint8)
        y, x = (np.random.randint(0, size - 160 + 1) for size in image.shape[:2])
        crop = image[y : y + 160, x : x + 160]
        return {**sample, "crop": crop[:, ::-1] if np.random.random() < 0.5 else crop}

    def batch(self, samples):
        texts = [np.frombuffer(s.get("txt", "none").encode(), np.uint8) for s in samples]
        halves = (texts[: len(texts) // 2], texts[len(texts) // 2 :])
        return {
            "images": np.stack([sample["crop"] for sample in samples]),
            "captions": [sample.get("txt", "") for sample in samples],
            "packed": [pack_sequences(half, pad_to=320) for half in halves],
        }


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return make_showcase(tmp_path_factory.mktemp("showcase"))


@pytest.fixture(scope="module")
def quarantine(tmp_path_factory):
    # Screenshots show its name, so it has no number; whoever steals tests makes it once more.
    folder = tmp_path_factory.mktemp("quarantine") / "bad"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def address(blend, quarantine):
    shown = Shown(os.path.relpath(blend))
    with served(make_app(shown, notes=Notes(quarantine), encoder=Crops)) as address:
        yield address


@pytest.fixture
def page(browser, address):
    """A page that has no errors, and loads nothing from anywhere else."""
    context = browser.new_context(base_url=address, viewport={"width": 1180, "height": 800})
    context.set_default_timeout(60_000)
    page = context.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: said.type == "error" and problems.append(said.text))
    page.on(
        "request",
        lambda asked: (
            asked.url.startswith((address, "data:")) or problems.append(f"asked for {asked.url}")
        ),
    )
    yield page
    context.close()
    assert problems == []


def shoot(page, name):
    """Draw an image of the documentation, if that is asked for."""
    if not os.environ.get("SCREENSHOTS"):
        return
    page.wait_for_load_state("networkidle")
    data = page.screenshot(animations="disabled")
    colors = Image.open(io.BytesIO(data)).convert("RGB")
    small = colors.resize((colors.width * 3 // 4, colors.height * 3 // 4), Image.Resampling.LANCZOS)
    IMAGES.mkdir(exist_ok=True)
    small.quantize(128).save(IMAGES / f"{name}.png", optimize=True)


def loaded(page, selector):
    """Return whether all images that can be seen have been drawn."""
    return page.wait_for_function(
        "selector => [...document.querySelectorAll(selector)]"
        ".every(image => image.complete && image.naturalWidth > 0)",
        arg=selector,
    )


def test_people_find_their_way_by_links_and_by_keys(page):
    page.goto("/")
    rows = page.locator("section").first.locator("tbody tr")
    assert rows.count() == 2
    assert "90 %" in rows.first.inner_text()
    assert "ramp to 0.5 at sample 4,000" in rows.first.inner_text()
    page.get_by_role("link", name="views").first.click()
    page.get_by_role("link", name="view_0007").click()
    assert page.locator("h1").inner_text().strip() == "view_0007"
    page.wait_for_load_state()  # Keys work once the script of the page has run.
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**/s/0/0/8")
    page.keyboard.press("h")
    page.wait_for_url("**/s/0/0/7")
    page.keyboard.press("z")
    assert "full" in page.locator(".zoom").first.get_attribute("class")
    page.keyboard.press("u")
    page.wait_for_url("**/s/0/0?from=0")
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_the_gallery_shows_thumbnails(page):
    page.goto("/s/0/0")
    assert page.locator(".card").count() >= 60
    loaded(page, ".card:nth-child(-n+12) img")
    shoot(page, "view_gallery")
    page.goto("/s/0/1")
    loaded(page, ".card img")


def test_a_gallery_of_any_length_can_be_scrolled(page, browser, tmp_path):
    make_crude(tmp_path / "ds", [1500, 1500])
    with served(make_app(Shown(tmp_path / "ds"))) as address:
        other = browser.new_page(viewport={"width": 1000, "height": 700})
        other.set_default_timeout(60_000)
        other.goto(f"{address}/s/0/0")
        numbers = (
            "[...document.querySelectorAll('.card a')].map(a => Number(a.href.split('/').pop()))"
        )

        def scroll_to(wanted, by):
            while True:  # the time limit of the test ends what never comes
                other.mouse.wheel(0, by)
                other.wait_for_timeout(20)
                found = other.evaluate(numbers)
                assert found == [*range(found[0], found[-1] + 1)]
                assert len(found) <= 430
                if found[0] <= wanted <= found[-1]:
                    return found

        other.focus("#scrub")
        other.keyboard.press("ArrowDown")  # leads to the next row, and stays there
        other.wait_for_function("() => Number(scrub.value) > 0 && scrollY > 0")
        assert "Sample 0 of" not in other.locator("#range").inner_text()
        other.mouse.move(400, 400)
        assert scroll_to(700, 2500)[0] > 0  # what is far above was dropped
        # The slider leads anywhere at once; scrolling continues from there, up and down.
        other.evaluate("scrub.value = 2000; scrub.dispatchEvent(new Event('change'))")
        other.wait_for_function(f"() => ({numbers}).includes(2000)")
        scroll_to(1900, -600)
        scroll_to(2999, 2500)
        assert "from=" in other.url
        assert "of 3,000" in other.locator("#range").inner_text()
        other.close()


def test_samples_are_found_by_key_by_number_and_by_condition(page):
    page.goto("/s/0/0")
    page.keyboard.press("/")
    page.keyboard.type("view_003")
    page.keyboard.press("Enter")
    page.wait_for_url("**key=view_003")
    assert page.locator(".card").count() == 10
    page.keyboard.press("u")
    page.wait_for_url("**/s/0/0")
    page.keyboard.press("g")
    page.keyboard.type("200")
    page.keyboard.press("Enter")
    page.wait_for_url("**from=200*")
    assert "view_0200" in page.locator(".card").first.inner_text()
    page.keyboard.press("w")
    page.keyboard.type("jpg.width>=360 json.time=night")
    page.keyboard.press("Enter")
    page.wait_for_url("**where=*")
    times = page.locator(".card .text").all_inner_texts()
    assert times
    assert all("at night" in text for text in times)


def test_samples_are_sorted_in_a_table(page):
    page.goto("/s/0/0")
    page.keyboard.press("v")
    page.wait_for_url("**view=table")
    page.get_by_role("link", name="jpg: bytes").click()
    page.wait_for_url("**sort=jpg%3Abytes")
    page.get_by_role("link", name="jpg: bytes").click()
    page.wait_for_url("**sort=-jpg%3Abytes")
    header = page.locator("thead tr").last.locator("th").all_inner_texts()
    at = next(n for n, name in enumerate(header) if name.startswith("jpg: bytes"))
    sizes = page.locator(f"tbody td:nth-child({at + 1})").all_inner_texts()
    numbers = [int(size.replace(",", "")) for size in sizes]
    assert len(numbers) == 60
    assert numbers == sorted(numbers, reverse=True)
    loaded(page, "tbody tr:nth-child(-n+5) img")
    shoot(page, "view_table")


def test_a_search_shows_what_it_has_found_and_can_be_stopped(page, browser, tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "PROGRESS_SECONDS", 0.0)
    gate, original = threading.Event(), Where.__call__

    def check(where, files, key):
        if key == "s40":
            assert gate.wait(60)
        return original(where, files, key)

    monkeypatch.setattr(Where, "__call__", check)
    make_crude(tmp_path / "ds", [400])
    with served(make_app(Shown(tmp_path / "ds"))) as address:
        other = browser.new_page()
        other.set_default_timeout(60_000)
        other.goto(f"{address}/s/0/0?text=text+1", wait_until="commit")
        progress = other.locator(".seen:visible", has_text="40 of 400 samples searched")
        progress.wait_for()
        assert other.locator(".seen:visible").count() == 1
        assert other.locator(".card").count() == 11
        progress.get_by_role("button", name="Stop").click()
        gate.set()
        other.goto(address + progress.locator("a").get_attribute("href"))
        assert other.locator(".card").count() == 60
        other.close()


def test_sounds_and_videos_are_played_by_ranges(page):
    answers = []
    page.on("response", lambda answer: "/raw/" in answer.url and answers.append(answer))
    for path, tag in (("/s/0/1/2", "audio"), ("/s/0/1/3", "video")):
        answers.clear()
        page.goto(path)
        player = page.locator(tag)
        player.evaluate(
            "player => new Promise((done, failed) => {"
            " const seek = () => { player.onseeked = done; player.currentTime = 1 };"
            " player.onerror = () => failed(player.error.message);"
            " player.readyState ? seek() : (player.onloadedmetadata = seek) })"
        )
        assert player.evaluate("player => player.duration") > 1
        assert {answer.status for answer in answers} == {206}
        assert all(answer.request.headers["range"].startswith("bytes=") for answer in answers)
    page.goto("/s/0/1/2")
    loaded(page, ".wave")


def test_talks_and_documents_are_laid_out_with_their_images(page):
    page.goto("/s/0/1/0")
    loaded(page, "img")
    first, second, third, _ = page.locator(".turns li").all()
    assert first.locator("img").count() == 1
    assert "What time of day" in first.inner_text()
    assert "assistant" in second.inner_text()
    assert third.locator("img").count() == 1
    shoot(page, "view_chat")
    page.goto("/s/0/1/1")
    assert page.locator(".turns li img").count() == 2
    page.locator(".turns").scroll_into_view_if_needed()
    shoot(page, "view_document")


def test_the_bars_of_plots_lead_to_their_samples(page):
    page.goto("/s/0/0/statistics")
    shoot(page, "view_statistics")
    plot = page.locator("figure", has_text="json.time")
    title = plot.locator("a title").first.text_content()
    name, count = re.fullmatch(r"(\w+): (\d+)", title).groups()
    plot.locator("a").first.click()
    page.wait_for_url("**where=*")
    assert page.locator(".told").inner_text().startswith("60 matches")
    assert int(count) > 60
    assert all(f"at {name}" in text for text in page.locator(".card .text").all_inner_texts())


def test_samples_are_excluded_and_flagged_where_they_are_seen(page, quarantine):
    page.goto("/s/0/0/7")
    page.keyboard.press("n")
    page.keyboard.type("too red")
    page.get_by_role("button", name="Exclude").click()
    page.wait_for_selector("h1 .chip")
    page.wait_for_load_state()  # Keys work once the script of the page has run.
    file = quarantine / "views.jsonl"
    assert json.loads(file.read_text())["key"] == "view_0007"
    page.keyboard.press("u")
    page.wait_for_url("**from=0")
    assert "excluded: too red" in page.locator(".card", has_text="view_0007").inner_text()
    page.goto("/run?step=2")
    card = page.locator(".card").first
    key = card.locator(".key").inner_text()
    card.get_by_text("exclude or flag").click()
    card.get_by_role("textbox").fill("look again")
    card.get_by_role("button", name="Flag").click()
    page.wait_for_selector(".card .chip.flagged")
    assert "/run?step=2" in page.url
    assert f'"key": "{key}"' in "".join(each.read_text() for each in quarantine.iterdir())
    page.goto("/s/0/0/7")
    page.get_by_role("button", name="Undo").click()
    page.wait_for_selector("h1 .chip", state="detached")
    assert "view_0007" not in file.read_text()


def test_several_samples_are_selected_while_others_come_and_go(page, quarantine):
    page.goto("/s/0/0")
    page.wait_for_load_state()
    page.locator(".card a").nth(1).focus()
    page.keyboard.press("x")
    page.get_by_label("Select view_0003").check()
    status = page.locator("#picked-count")
    assert status.inner_text() == "2 samples selected"
    page.evaluate("scrub.value = 200; scrub.dispatchEvent(new Event('change'))")
    page.get_by_label("Select view_0200").check()
    assert status.inner_text() == "3 samples selected"
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    page.keyboard.type("all alike")
    page.locator(".picked").get_by_role("button", name="Flag").click()
    page.wait_for_selector(".card .chip.flagged")
    lines = (quarantine / "views.jsonl").read_text().splitlines()
    told = [json.loads(line.removeprefix("# note ")) for line in lines if "all alike" in line]
    assert sorted(each["key"] for each in told) == ["view_0001", "view_0003", "view_0200"]
    assert not status.is_visible()


def test_a_run_is_followed_step_by_step_to_the_batches_of_its_trainer(page):
    page.goto("/run")
    page.keyboard.press("g")
    page.keyboard.type("41")
    page.get_by_label("To", exact=True).fill("43")
    page.get_by_label("Batch size").fill("6")
    page.keyboard.press("Enter")
    page.wait_for_url("**step=41*")
    assert page.locator("h2", has_text=re.compile(r"^Step 4[123]$")).count() == 3
    assert page.locator(".card").count() == 18
    shoot(page, "view_steps")
    page.keyboard.press("l")
    page.wait_for_url("**step=44*")
    keys = page.locator(".card .key").all_inner_texts()[:6]
    page.get_by_role("link", name="rank 0").first.click()
    page.wait_for_url("**/run/batch?*")
    pairs = page.locator(".pairs li")
    assert [each.locator(".soft").first.inner_text() for each in pairs.all()] == keys
    loaded(page, ".pairs img")
    assert page.locator(".plot .padding").count() == 2
    shoot(page, "view_batch")


def test_nothing_in_a_dataset_runs(page, browser, tmp_path):
    script = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    svg = "<svg xmlns='http://www.w3.org/2000/svg' onload='window.hacked = 1'/>"
    parts = {
        "json": json.dumps({"messages": [{"role": script, "content": script}], script: script}),
        "html": script,
        "svg": svg,
        "txt": script,
        "jpg": svg,
    }
    content = {name: text.encode() for name, text in parts.items()}
    write_shard(
        tmp_path / "ds/0.tar",
        [(f"<img src=x onerror=window.hacked=1>{n}", content) for n in range(3)],
    )
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    with served(make_app(Shown(tmp_path / "ds"))) as address:
        other = browser.new_page()
        other.on("dialog", lambda dialog: pytest.fail(f"a dialog: {dialog.message}"))
        for path in ("/", "/s/0/0", "/s/0/0/1", "/s/0/0/statistics", "/run?batch_size=2"):
            other.goto(f"{address}{path}")
            assert other.evaluate("window.hacked") is None, path
        for number in range(5):  # on its own, a part is saved or it is an image; it never runs
            answer = other.request.get(f"{address}/s/0/0/0/raw/{number}")
            assert "sandbox" in answer.headers["content-security-policy"]
            shown = answer.headers["content-type"].partition(";")[0]
            assert shown in ("application/octet-stream", "image/jpeg")
        other.close()


ATTACK = """<!doctype html><img id="seen" src="{0}/s/0/0/7/thumb/0">
<iframe src="{0}/s/0/0/7"></iframe>
<form method="post" action="{0}/s/0/0/7/note"><input name="what" value="exclude"></form>
<script src="{0}/s/0/0/7/raw/0" onload="window.hacked = 1"></script>"""


def test_a_page_of_another_site_can_read_nothing_and_send_nothing(browser, address, quarantine):
    async def other_site(scope, receive, send):
        body = ATTACK.format(address).encode()
        kind = (b"content-type", b"text/html")
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        await send({"type": "http.response.body", "body": body})

    before = sorted(path.read_text() for path in quarantine.iterdir())
    with served(other_site) as elsewhere:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(elsewhere)
        assert page.locator("#seen").evaluate("image => image.naturalWidth") == 0
        for mode in ("cors", "no-cors"):
            asked = f"fetch('{address}/s/0/0/7', {{mode: '{mode}'}}).then(a => a.text())"
            assert page.evaluate(f"{asked}.catch(() => '')") == ""
        assert page.evaluate("window.hacked") is None
        assert "view_0007" not in page.frames[1].content()
        page.evaluate("document.forms[0].submit()")
        page.wait_for_url("**/note")
        assert "may only link to these pages" in page.content()
        page.goto(elsewhere)
        page.evaluate(f"location.href = '{address}/s/0/0/7'")
        page.wait_for_selector("h1")  # a link is followed
        page.close()
    assert sorted(path.read_text() for path in quarantine.iterdir()) == before


# Of what there is many times, these have few, since each element is checked several times.
PAGES = (
    *("/", "/s/0/0?from=228", "/s/0/0?key=none", "/s/0/0/7", "/s/0/0/shards", "/s/0/0/statistics"),
    *("/s/0/0?view=table&sort=bytes&from=228", "/s/0/0?text=dusk&where=json.score%3E=0.9"),
    *("/s/0/1/0", "/s/0/1/2", "/s/0/1/3", "/s/0/1/4", "/s/0/1/6", "/run?step=2"),
    "/run/batch?step=2&rank=0&batch_size=6",
)
AXE = TOOLS / "node_modules/axe-core/axe.min.js"


ALL_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]

THEMED_RULES = ["color-contrast", "link-in-text-block"]


def test_everybody_can_use_the_pages_at_any_width_and_in_both_themes(page):
    if not AXE.is_file():
        lack("axe-core")
    for path in PAGES:
        page.goto(path)
        page.evaluate(AXE.read_text())
        for width, scheme in itertools.product((390, 1440), ("light", "dark")):
            is_first = (width, scheme) in ((390, "light"), (1440, "dark"))
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            found = page.evaluate(
                "tags => axe.run({runOnly: tags})", ALL_RULES if is_first else THEMED_RULES
            )
            broken = [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]]
            assert broken == [], path
            contrasts = page.evaluate(_CONTRASTS)
            assert min(contrasts.values()) >= 4.5, contrasts


_CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement);
  const canvas = document.createElement("canvas").getContext("2d");
  const light = (name) => {
    canvas.fillStyle = style.getPropertyValue(name).trim();
    const parts = [1, 3, 5].map((n) => parseInt(canvas.fillStyle.slice(n, n + 2), 16) / 255)
      .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const found = {};
  for (const ink of ["--ink", "--soft", "--link", "--bad", "--warn"])
    for (const paper of ["--paper", "--panel", "--box", "--hover"]) {
      const pair = [light(ink), light(paper)].sort((a, b) => b - a);
      found[`${ink} on ${paper}`] = (pair[0] + 0.05) / (pair[1] + 0.05);
    }
  return found;
}"""
