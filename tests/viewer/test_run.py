from __future__ import annotations

import json
import re

import pytest

from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon.inspect.planned_run import open_saved_run
from energon.viewer.run import show_saved_run
from tests.datasets import make_crude
from tests.viewer.pages import browse


class Keys(DefaultTaskEncoder):
    decoder = None

    def batch(self, samples):
        return [sample["__key__"] for sample in samples]


@pytest.fixture
def blend(tmp_path):
    make_crude(tmp_path / "a", [30], prefix="a")
    make_crude(tmp_path / "b", [20, 20], prefix="b")
    path = tmp_path / "blend.yaml"
    path.write_text(
        "splits: {val: {path: a}, train: {blend: [{path: b, weight: 3}, {path: a, weight: 1}]}}\n"
    )
    return path


def loader(path, rank=0, world_size=1, **settings):
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, **settings)
    dataset = get_train_dataset(path, worker_config=config, batch_size=4, task_encoder=Keys())
    return get_savable_loader(dataset)


def keys(text):
    return re.findall(r'<span class="key">([ab]\d+)</span>', text)


def test_shows_the_batches_that_a_trainer_gets(blend):
    client = browse(blend)
    with loader(blend, seed_offset=5) as batches:
        expected = [batch for batch, _ in zip(batches, range(6), strict=False)]
    answer = client.get("/run?step=3&steps=2&batch_size=4&seed=5")
    assert answer.status_code == 200
    assert keys(answer.text) == expected[3] + expected[4]
    # Each leads to the page of its sample.
    link = re.search(r'href="(/s/\d/\d/\d+)">\s*<span class="key">([ab]\d+)<', answer.text)
    assert f"<h1>{link[2]}</h1>" in client.get(link[1]).text
    later = re.search(r'rel="next" href="(.*?)"', answer.text)[1].replace("&amp;", "&")
    assert keys(client.get("/run" + later).text)[:4] == expected[5]


def test_shows_the_shares_of_datasets_over_the_run(blend):
    text = browse(blend).get("/run?batch_size=4").text
    assert text.count("<polygon") == 2
    assert re.search(r"b/train</td><td class=\"right\">40</td>", text)


def test_settings_that_make_no_sense_are_said(blend):
    client = browse(blend)
    for query, said in [
        ("batch_size=0", "1 sample or more"),
        ("world_size=99999999", "more than the 100000 samples"),
        ("split=nothing", "there is no split &#39;nothing&#39;, only val, train"),
        ("world_size=0", "world size 0"),
    ]:
        answer = client.get(f"/run?{query}")
        assert answer.status_code == 200
        assert said in answer.text
    assert client.get("/run?step=-1").status_code == 400
    assert client.get("/run?step=99999999999999999999").status_code == 400
    assert client.get("/run?step=999999999999999").status_code == 200


def test_a_state_brings_the_settings_and_the_position(blend):
    states, expected = [], []
    for rank in range(2):
        with loader(blend, rank, 2, seed_offset=9) as batches:
            for _ in zip(range(5), batches, strict=False):
                pass
            states.append(json.loads(json.dumps(batches.state_dict())))
            expected += next(iter(batches))
    from energon.loader.state import merge_states

    saved = open_saved_run(blend, merge_states(states), world_size=2)
    client = browse(blend, saved=show_saved_run(str(blend), "train", 1, saved))
    text = client.get("/run?step=5").text
    assert keys(text) == expected
    assert 'saved before step <a href="/run?step=5">5</a>' in text
    assert "Seed 9, batches of 4, 2 ranks" in text
    # What a form says does not count.
    assert keys(client.get("/run?step=5&batch_size=1&seed=1").text) == expected
    link = re.search(r'href="(/s/1/\d/\d+)">\s*<span class="key">([ab]\d+)<', text)
    assert f"<h1>{link[2]}</h1>" in client.get(link[1]).text
