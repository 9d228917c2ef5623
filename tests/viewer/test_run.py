from __future__ import annotations

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from energon import (
    DefaultTaskEncoder,
    PlannedPacks,
    SampleDecoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
    stateless,
)
from energon.inspect.saved_run import open_saved_run
from energon.loader.state import merge_states
from energon.packing import pack_sequences
from energon.viewer.run import show_saved_run
from energon.viewer.shown import Shown
from tests.datasets import make_captions, make_crude, write_shard
from tests.encoders import Keys
from tests.viewer.pages import browse


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


CARD = re.compile(r'<a href="(/s/\d/\d/\d+)">.*?<span class="key">([ab]\d+)<', re.DOTALL)


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
    link = CARD.search(answer.text)
    assert f"<h1>{link[2]} " in client.get(link[1]).text
    later = re.search(r'rel="next" href="(.*?)"', answer.text)[1].replace("&amp;", "&")
    assert keys(client.get("/run" + later).text)[:4] == expected[5]


def test_shows_the_shares_of_datasets_over_the_run(blend):
    text = browse(blend).get("/run?batch_size=4").text
    assert text.count("<polygon") == 2
    assert re.search(r"b/train</td><td class=\"right\">40</td>", text)


def test_steps_beyond_those_of_a_page_are_announced(blend):
    client = browse(blend)
    text = client.get("/run?step=5&last=99").text
    assert "Steps 5 to 24</h1>" in text
    assert "A page shows 20 steps." in text
    assert "?step=25&amp;last=44" in text
    assert "A page shows" not in client.get("/run?step=5&last=24").text


def test_settings_that_make_no_sense_are_said(blend):
    client = browse(blend)
    for query, said in [
        ("batch_size=0", "expected a batch size of 1 or more"),
        ("world_size=99999999", "more than 100000 samples"),
        ("num_workers=99999999", "more than 1000000 workers"),
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
    saved = open_saved_run(merge_states(states), path=blend, world_size=2)
    client = browse(blend, saved=show_saved_run(1, saved))
    text = client.get("/run?step=5").text
    assert keys(text) == expected
    assert keys(client.get("/run").text) == expected  # begins where the run was saved
    assert 'Saved before step <a href="/run?step=5">5</a>' in text
    assert "From the state: seed 9, batch size 4, 2 ranks" in text
    # What a form says does not count.
    assert keys(client.get("/run?step=5&batch_size=1&seed=1").text) == expected
    link = CARD.search(text)
    assert f"<h1>{link[2]} " in client.get(link[1]).text


class Flips(DefaultTaskEncoder):
    """Batches whose content depends on the seed of each sample."""

    decoder = SampleDecoder(image_decode="rgb8")

    @stateless(restore_seeds=True)
    def encode_sample(self, sample):
        if np.random.random() < 0.5:
            sample.image = sample.image[:, ::-1].copy()
        return sample

    def batch(self, samples):
        return {
            "keys": [sample.__key__ for sample in samples],
            "images": np.stack([sample.image for sample in samples]),
            "latents": np.zeros((len(samples), 4, 8, 8), np.float32),
            "draws": np.array([np.random.randint(1000) for _ in samples]),
        }


class Broken(DefaultTaskEncoder):
    def batch(self, samples):
        raise ZeroDivisionError("<b>")


def test_batches_are_those_that_the_trainer_gets_after_its_hooks(tmp_path):
    root = make_captions(tmp_path / "ds", [40])
    states, expected = [], []
    for rank in range(2):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=0, seed_offset=9)
        dataset = get_train_dataset(
            root, worker_config=config, batch_size=4, task_encoder=Flips(), shuffle_buffer_size=8
        )
        with get_savable_loader(dataset) as batches:
            given = iter(batches)
            first = [next(given) for _ in range(3)]
            states.append(json.loads(json.dumps(batches.state_dict())))
            expected.append([*first, *(next(given) for _ in range(3))])
    saved = open_saved_run(merge_states(states), path=root, world_size=2)
    run = show_saved_run(0, saved)
    client = browse(root, saved=run, encoder=Flips)
    assert 'href="/run/batch?step=4&amp;rank=1"' in client.get("/run?step=4").text
    for step, rank in [(0, 0), (1, 1), (4, 1), (5, 0)]:
        text = client.get(f"/run/batch?step={step}&rank={rank}").text
        batch = expected[rank][step]
        assert re.findall(r'<span class="string">(\w+)<', text) == batch["keys"]
        assert ", ".join(map(str, batch["draws"])) in text
        assert "4 x 8 x 12 x 3 uint8" in text
        shown_images = re.findall(r'src="data:image/jpeg;base64,(.*?)"', text)
        assert len(shown_images) == 4
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown_images[0]))), np.float32)
        here, turned = (
            np.abs(shown - image).mean()
            for image in (batch["images"][0], batch["images"][0][:, ::-1])
        )
        assert here < turned
    assert "there is no rank 2" in client.get("/run/batch?step=0&rank=2").text
    broken = browse(root, saved=run, encoder=Broken)
    answer = broken.get("/run/batch?step=0")
    assert answer.status_code == 200
    assert "&lt;b&gt;" in answer.text


def test_without_an_encoder_there_are_no_batches(blend):
    assert browse(blend).get("/run/batch").status_code == 404


def test_of_large_steps_the_first_samples_are_shown(blend):
    client = browse(blend)
    text = client.get("/run?batch_size=1000&world_size=64&step=41200&last=41210").text
    assert len(keys(text)) == 11 * 90
    assert text.count("The first 90 of 64,000 samples") == 11
    text = client.get("/run?batch_size=4&world_size=2&step=7").text
    assert len(keys(text)) == 8
    assert "The first" not in text


class Labels(DefaultTaskEncoder):
    def batch(self, samples):
        lengths = [np.arange(3 + n) for n, _ in enumerate(samples)]
        return {"label": np.arange(7, 7 + len(samples)), "packed": [pack_sequences(lengths)]}


def test_numbers_and_packed_sequences_are_shown_as_such(blend):
    text = browse(blend, encoder=Labels).get("/run/batch?batch_size=4").text
    labels = re.findall(r'<span class="soft">label</span>\s*<span class="text">(\d+)</span>', text)
    assert labels == ["7", "8", "9", "10"]
    assert "PackedSequence: " in text
    shown = "ndarray (5,) int32: 0, 3, 7, 12, 18"
    assert f'<b>cu_seqlens</b>: <span class="other">{shown}</span>' in text
    assert "array(" not in text


def test_shares_are_shown_until_weights_no_longer_change(tmp_path):
    make_crude(tmp_path / "a", [30])
    make_crude(tmp_path / "b", [30])
    path = tmp_path / "blend.yaml"
    for unit, batches in (("samples", 250), ("batches", 2500)):
        path.write_text(
            f"splits: {{train: {{schedule_unit: {unit}, blend: [{{path: a, weight: 1}}, "
            "{path: b, weight: {0: 0, 2000: 9}}]}}\n"
        )
        text = browse(path).get("/run?batch_size=10").text
        assert f"in {batches:,} batches" in text
        assert re.search(r"<title>b/train: 0.0 % → 90.\d %</title>", text)
    path.write_text("splits: {train: {blend: [{path: a, weight: 1}, {path: b, weight: 9}]}}\n")
    assert "in 6 batches" in browse(path).get("/run?batch_size=10").text


class Gaps(DefaultTaskEncoder):
    decoder = None

    def batch(self, samples):
        return {"nothing": None, "sizes": np.array([len(s["txt"]) for s in samples])}


def test_a_batch_names_datasets_and_the_costs_of_all_ranks_and_no_empty_fields(blend):
    client = browse(blend, encoder=Gaps)
    costs = []
    for rank in range(2):
        query = f"step=1&rank={rank}&batch_size=4&world_size=2"
        text = client.get(f"/run/batch?{query}").text
        assert "nothing" not in text
        names = re.findall(r'<span class="soft">([ab])\d+</span><span class="soft">(.)/train', text)
        assert len(names) == 4
        assert all(key == leaf for key, leaf in names)
        costs.append(re.findall(r"<title>rank (\d): ([\d.,]+)</title>", text))
        ordinals = re.findall(r'<a href="/s/1/(\d)/(\d+)"><span', text)
        sizes = [
            Shown(blend).leaf(1, int(leaf)).measure("bytes", np.array([int(ordinal)]))[0]
            for leaf, ordinal in ordinals
        ]
        assert float(costs[0][rank][1].replace(",", "")) == sum(sizes)
        assert "by which the run does not balance them" in text
    assert costs[0] == costs[1]


class Packs(Keys):
    """Packs of samples of 3 and 4 tokens, padded to 16."""

    def select_samples_to_pack(self, samples):
        return [samples[at : at + 3] for at in range(0, len(samples), 3)]

    def pack_selected_samples(self, samples):
        numbers = [int(sample["__key__"][1:]) for sample in samples]
        values = [np.full(3 + number % 2, number) for number in numbers]
        return {
            "keys": [sample["__key__"] for sample in samples],
            "values": values,
            "__restore_key__": tuple(sample["__restore_key__"] for sample in samples),
        }

    def batch(self, packs):
        return {
            "keys": [" ".join(pack["keys"]) for pack in packs],
            "packed": [pack_sequences(pack["values"], pad_to=16) for pack in packs],
            "__restore_key__": tuple(pack["__restore_key__"] for pack in packs),
        }


def test_a_state_of_a_run_that_packs_shows_the_batches_behind_it(tmp_path):
    root = make_crude(tmp_path / "a", [60], prefix="a")
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=3)
    dataset = get_train_dataset(
        root,
        worker_config=config,
        batch_size=2,
        packing_buffer_size=12,
        task_encoder=Packs(),
    )
    with get_savable_loader(dataset) as batches:
        given = iter(batches)
        for _ in range(3):
            next(given)
        state = merge_states(json.loads(json.dumps(batches.state_dict())))
        after = [next(given) for _ in range(3)]
    saved = open_saved_run(state, may_pack=True)
    client = browse(root, saved=show_saved_run(0, saved), encoder=Packs)
    for step, batch in enumerate(after, 3):
        text = client.get(f"/run/batch?step={step}&rank=0").text
        assert re.findall(r'<span class="string">([a\d ]+)<', text) == batch["keys"]
        assert 'class="packing"' in text
        links = re.findall(r'<td><a href="(/s/0/0/\d+)">(a\d+)</a></td><td>a/train</td>', text)
        assert [key for _, key in links] == " ".join(batch["keys"]).split()
        assert f"<h1>{links[0][1]} " in client.get(links[0][0]).text
    # What a step reads is known by its batches only.
    assert CARD.search(client.get("/run?step=3").text) is None


class PlannedTexts(Keys):
    def pack_selected_samples(self, samples):
        return {
            "keys": [sample["__key__"] for sample in samples],
            "__restore_key__": tuple(sample["__restore_key__"] for sample in samples),
        }

    def batch(self, packs):
        return {
            "keys": [" ".join(pack["keys"]) for pack in packs],
            "__restore_key__": tuple(pack["__restore_key__"] for pack in packs),
        }


def test_a_batch_of_planned_packs_shows_the_costs_of_all_ranks(tmp_path):
    lengths = {f"k{n}": n * n % 23 + 1 for n in range(120)}
    samples = [(key, {"txt": b"x" * length}) for key, length in lengths.items()]
    write_shard(tmp_path / "0.tar", samples)
    prepare_dataset(tmp_path, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    states, costs = [], []
    for rank in range(2):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=0, lanes=2, seed_offset=3)
        dataset = get_train_dataset(
            tmp_path,
            worker_config=config,
            batch_size=2,
            pack=PlannedPacks(length="txt:bytes", context=32),
            task_encoder=PlannedTexts(),
        )
        with get_savable_loader(dataset) as batches:
            given = iter(batches)
            next(given)
            states.append(json.loads(json.dumps(batches.state_dict())))
            costs.append(
                [
                    sum(lengths[key] ** 2 for pack in next(given)["keys"] for key in pack.split())
                    for _ in range(4)
                ]
            )
    state = merge_states(states)
    saved = open_saved_run(state, may_pack=True)
    client = browse(tmp_path, saved=show_saved_run(0, saved), encoder=PlannedTexts)
    for step, expected in enumerate(zip(*costs, strict=True), 1):
        for rank in range(2):
            text = client.get(f"/run/batch?step={step}&rank={rank}").text
            shown = re.findall(r"<title>rank \d: ([\d.,]+)</title>", text)
            assert [int(each.replace(",", "")) for each in shown] == list(expected)
