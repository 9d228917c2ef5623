"""Conversations as tokens, with a tokenizer of Hugging Face if transformers is installed."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, SampleError
from energon.packing import chat_messages, chat_tokens, image_tokens

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
REASONING = (  # which earlier answers lose
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT_WITH_REASONING = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
INSTRUCTIONS_LAST = (
    "{% for m in messages %}{% if m.role == 'user' and loop.last %}[BE BRIEF]{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
PIECE = re.compile(r"<\|?\w+\|?>|\w+|\s|[^\w\s]")


class Tokenizer:
    """A tokenizer of words and marks, with the methods of one of Hugging Face."""

    is_fast = True

    def __init__(self, template):
        self.template = template

    def get_chat_template(self, tools=None):
        return self.template

    def apply_chat_template(
        self, messages, *, tokenize=True, return_dict=True, add_generation_prompt=False, **names
    ):
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = self.fail
        render = environment.from_string(self.template).render
        assert not tokenize
        return render(messages=messages, add_generation_prompt=add_generation_prompt, **names)

    def fail(self, message):
        raise jinja2.TemplateError(message)

    def __call__(self, text, *, add_special_tokens, return_offsets_mapping):
        assert not add_special_tokens
        assert return_offsets_mapping
        spans = [found.span() for found in PIECE.finditer(text)]
        return {"input_ids": [sum(map(ord, text[a:b])) for a, b in spans], "offset_mapping": spans}


@pytest.fixture(scope="module")
def hugging_face():
    """Makes a tokenizer of words with a chat template."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")

    def make(template):
        model = tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>")
        words = tokenizers.Tokenizer(model)
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECE.pattern), "isolated")
        words.pre_tokenizer = split
        trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<unk>"])
        words.train_from_iterator(["user assistant system a b c d 1 2"] * 2, trainer)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
        fast.chat_template = template
        return fast

    return make


def conversation(*turns):
    return [
        {"role": ("assistant" if number % 2 else "user"), "content": text}
        for number, text in enumerate(turns)
    ]


def learned(template, messages, **settings):
    """Return the text that is learned, an answer after the other."""
    tokenizer = Tokenizer(template)
    found = chat_tokens(tokenizer, messages, **settings)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    pieces = [text[slice(*each.span())] for each in PIECE.finditer(text)]
    assert found.tokens.dtype == np.int64
    assert len(found.tokens) == len(found.loss_mask) == len(pieces)
    edges = np.flatnonzero(np.diff(found.loss_mask, prepend=False, append=False))
    return ["".join(pieces[a:b]) for a, b in edges.reshape(-1, 2)]


TURNS = st.lists(st.text("ab 1.", min_size=1, max_size=6).map(str.strip), min_size=1, max_size=6)


@given(TURNS)
@settings(deadline=None, max_examples=40)
def test_the_answers_are_learned_and_the_end_of_their_turns(turns):
    messages = conversation(*turns)
    answers = turns[1::2]
    assert learned(CHATML, messages) == [f"{each}<|im_end|>\n" for each in answers]
    assert learned(ALTERNATING, messages) == [f"{each}</s>" for each in answers]
    assert learned(PROMPT_WITH_REASONING, messages) == [f"{each}<|im_end|>\n" for each in answers]


@given(TURNS)
@settings(deadline=None, max_examples=40)
def test_answers_that_lose_their_reasoning_once_others_follow_are_learned_too(turns):
    expected = [f"{each}<|im_end|>\n" for each in turns[1::2]]
    if len(turns) % 2 == 0:
        expected[-1] = "<think>\n\n</think>\n\n" + expected[-1]
    assert learned(REASONING, conversation(*turns)) == expected


def test_variables_reach_the_template():
    template = "{{ tools }}" + CHATML
    found = chat_tokens(Tokenizer(template), conversation("a", "b"), template={"tools": "search"})
    without = chat_tokens(Tokenizer(template), conversation("a", "b"))
    assert len(found.tokens) == len(without.tokens) + 1
    assert found.loss_mask.sum() == without.loss_mask.sum()


def test_a_template_that_hides_where_answers_are_is_refused():
    with pytest.raises(SampleError, match=r"message 1 of 2: the chat template of Tokenizer.*gener"):
        chat_tokens(Tokenizer(INSTRUCTIONS_LAST), conversation("a", "b"))


def test_a_slow_tokenizer_is_refused():
    slow = Tokenizer(CHATML)
    slow.is_fast = False
    with pytest.raises(ConfigError, match="Tokenizer does not tell where"):
        chat_tokens(slow, conversation("a", "b"))


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, ALTERNATING, REASONING])
def test_tokenizers_of_hugging_face_agree(hugging_face, template):
    messages = conversation("a b", "c", "d", "1 2")
    found = chat_tokens(hugging_face(template), messages)
    assert found.loss_mask.tolist() == chat_tokens(Tokenizer(template), messages).loss_mask.tolist()


def test_a_template_may_mark_what_is_learned(hugging_face):
    found = chat_tokens(hugging_face(MARKED), conversation("a b", "c", "d", "1 2"))
    unmarked = chat_tokens(hugging_face(CHATML), conversation("a b", "c", "d", "1 2"))
    assert found.tokens.tolist() == unmarked.tokens.tolist()
    assert unmarked.loss_mask.sum() - found.loss_mask.sum() == 2, "the newline after each answer"


def test_processors_count_the_tokens_of_a_size():
    class Processor:
        def _get_num_multimodal_tokens(self, image_sizes):
            ((height, width),) = image_sizes
            return {"num_image_tokens": [height // 2 * width // 3]}

    assert image_tokens(Processor(), width=30, height=20) == 100
    with pytest.raises(ConfigError, match="SimpleNamespace does not count"):
        image_tokens(SimpleNamespace(), width=30, height=20)


def test_conversations_are_read_in_the_layouts_in_which_people_store_them():
    ours = {"messages": [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant"}]}
    llava = {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt"}]}
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    expected = [{"role": "user", "content": parts}, {"role": "assistant", "content": []}]
    assert chat_messages(ours) == chat_messages(llava) == chat_messages(expected) == expected
    texts = chat_messages([{"role": "user", "content": "a <image> b", "name": "c"}])
    assert texts[0]["name"] == "c"
    assert [part.get("text", part["type"]) for part in texts[0]["content"]] == ["a ", "image", " b"]


@pytest.mark.parametrize("chat", ["text", {"caption": "a"}, ["a turn"], [{"content": "a"}]])
def test_what_is_no_conversation_is_refused(chat):
    with pytest.raises(SampleError, match="expected a"):
        chat_messages(chat)


class Processor:
    """A processor whose images have as many tokens as they are wide."""

    image_token = "img"
    chat_template = CHATML

    def __init__(self):
        self.tokenizer = Tokenizer("")
        self.tokenizer.convert_tokens_to_ids = lambda token: sum(map(ord, token))
        self.tokenizer.get_chat_template = lambda chat_template: chat_template
        render = self.tokenizer.apply_chat_template
        self.tokenizer.apply_chat_template = self.render
        self._render = render

    def render(self, messages, *, chat_template, **settings):
        self.tokenizer.template = chat_template
        return self._render(messages, **settings)

    def _get_num_multimodal_tokens(self, image_sizes):
        return {"num_image_tokens": [width for _, width in image_sizes]}


@given(st.lists(st.integers(1, 5), max_size=3))
@settings(deadline=None, max_examples=20)
def test_images_have_all_of_their_tokens_and_none_is_learned(widths):
    messages = conversation("img " * len(widths) + "a", "b")
    found = chat_tokens(Processor(), messages, image_sizes=[(width, 9) for width in widths])
    single = chat_tokens(Processor(), messages)
    image = Processor().tokenizer.convert_tokens_to_ids("img")
    assert (found.tokens == image).sum() == sum(widths)
    assert found.tokens[found.loss_mask].tolist() == single.tokens[single.loss_mask].tolist()
    assert image not in found.tokens[found.loss_mask]


def test_another_number_of_images_is_refused():
    with pytest.raises(SampleError, match="has 1 image tokens 'img' for 2 images"):
        chat_tokens(Processor(), conversation("img", "b"), image_sizes=[(1, 1)] * 2)
