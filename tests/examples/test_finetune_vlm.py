"""The example that fine-tunes vision-language models on conversations with images."""

from __future__ import annotations

import io
import json
import runpy
import tarfile

import pytest
import torch
from PIL import Image

from energon import WorkerConfig, get_train_dataset
from tests.ranks import EXAMPLES, train, train_and_kill

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def program():
    pytest.importorskip("transformers")
    return runpy.run_path(str(EXAMPLES / "finetune_vlm.py"))


@pytest.fixture(scope="module")
def data(program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm") / "data"
    program["make_data"](folder)
    return folder


@pytest.fixture(scope="module")
def images(data):
    found = {}
    for shard in (data / "images").glob("*.tar"):
        with tarfile.open(shard) as file:
            for member in file:
                found[member.name] = Image.open(io.BytesIO(file.extractfile(member).read()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen", "llava"])
def test_a_pack_means_to_the_model_what_its_conversations_mean_to_it_one_by_one(
    program, data, images, family
):
    lines = (data / "chats.jsonl").read_text().splitlines()
    torch.manual_seed(0)
    family = program["FAMILIES"][family]()
    family.model.eval()
    dataset = get_train_dataset(
        program["chats"](data),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1,
        packing_buffer_size=64,
        repeat=False,
        task_encoder=program["ChatEncoder"](family.processor),
    )
    seen = []
    for number, pack in enumerate(dataset):
        seen += pack.__key__
        bounds = pack.cu_seqlens.unfold(0, 2, 1).tolist()
        with torch.no_grad():
            logits = family.logits(pack) if number < 2 else None
        for key, (start, stop) in zip(pack.__key__, bounds, strict=False):
            chat = json.loads(lines[int(key)])
            messages = program["chat_messages"](chat)
            own = [images[name].convert("RGB") for name in chat.get("images", ())]
            text = family.processor.apply_chat_template(messages)
            inputs = family.processor(text=[text], images=own or None, return_tensors="pt")
            assert pack.tokens[start:stop].tolist() == inputs["input_ids"][0].tolist()
            labels = pack.labels[start:stop]
            learned = family.processor.tokenizer.decode(labels[labels != program["IGNORED"]])
            end = "<|im_end|>\n" if family.has_3d_positions else "</s>"
            said = [m["content"] for m in chat["messages"] if m["role"] == "assistant"]
            assert learned == "".join(f"{each}{end}" for each in said)
            if logits is not None:
                with torch.no_grad():
                    alone = family.model(**inputs).logits[0]
                assert torch.allclose(logits[start:stop], alone, atol=1e-5)
    assert sorted(map(int, seen)) == list(range(len(lines)))


@pytest.mark.slow  # the first optimizer of a process takes seconds
@pytest.mark.parametrize("family", ["qwen", "llava"])
def test_a_run_goes_on_where_it_was_saved(program, data, tmp_path, family):
    main = program["main"]
    settings = ["--family", family, "--steps"]
    expected = main([str(data), str(tmp_path / "whole.pt"), *settings, "4"])
    main([str(data), str(tmp_path / "cut.pt"), *settings, "2"])
    assert main([str(data), str(tmp_path / "cut.pt"), *settings, "4"]) == expected


@pytest.mark.slow  # processes that import transformers
@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_with_other_workers_and_ranks(program, data, tmp_path):
    settings = {"program": "finetune_vlm.py"}
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    steps = 1 + train_and_kill(data, cut, "--workers", 2, ranks=1, **settings)
    expected = program["main"]([str(data), str(whole), "--steps", str(steps)])
    found = train(data, cut, "--steps", steps, "--workers", 1, ranks=2, **settings)
    assert found == pytest.approx(expected, abs=1e-3)
