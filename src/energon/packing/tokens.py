"""Tokens of samples, as tokenizers and processors of Hugging Face count them.

They are called through their own methods; `transformers` itself is never imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError, SampleError

_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class ChatTokens:
    """A conversation as tokens, and which of them the model learns.

    Args:
        tokens: int64, (length,).
        loss_mask: bool, (length,): True for the tokens of answers.

    Example:
        >>> chat = ChatTokens(np.array([5, 8, 2]), np.array([False, True, True]))
        >>> np.where(chat.loss_mask, chat.tokens, -100)  # labels
        array([-100,    8,    2])
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]


_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of LLaVA's layout, and those of chat templates."""


def chat_messages(chat: Any, *, image: str = "<image>") -> list[dict[str, Any]]:
    """Return a conversation in the form that chat templates of processors expect.

    Reads the layouts in which conversations are stored: a list of turns, or a dict that has one as
    `messages`, `conversations` or `conversation`; turns with `role` and `content`, or, as for
    LLaVA, `from` and `value`. Contents become lists of parts, in which each placeholder of an image
    is a part; parts that a content has already stay as they are.

    Args:
        chat: The conversation: a list of turns, or a dict that has one.
        image: The placeholder of an image in texts.

    Raises:
        SampleError: If it is no conversation.

    Example:
        >>> chat_messages({"conversations": [{"from": "human", "value": "<image>What is it?"}]})
        [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]}]
    """
    turns = turns_of(chat)
    if turns is None:
        kind = f"a dict of {sorted(chat)}" if isinstance(chat, Mapping) else type(chat).__name__
        raise SampleError(
            f"{kind} is no conversation; expected a list of turns, or a dict that has one as "
            "'messages' or 'conversations'"
        )
    return [_message(turn, image) for turn in turns]


def turns_of(chat: Any) -> Sequence[Any] | None:
    """Return the turns of a conversation, which is a list, or a dict with one; None for others."""
    if isinstance(chat, Mapping):
        named = (chat.get(name) for name in ("messages", "conversations", "conversation"))
        chat = next(filter(_is_list, named), None)
    return chat if _is_list(chat) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def role_and_content(turn: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the speaker and the content of a turn; None for each that is missing."""
    return turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))


def _message(turn: Any, image: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or not ({"role", "from"} & turn.keys()):
        raise SampleError(f"{turn!r} is no turn of a conversation; expected a dict with 'role'")
    message = {name: value for name, value in turn.items() if name not in ("from", "value")}
    role, content = role_and_content(turn)
    message["role"] = _ROLES.get(role, role)
    content = content or ""
    message["content"] = _parts(content, image) if isinstance(content, str) else content
    return message


def _parts(text: str, image: str) -> list[dict[str, str]]:
    """Return a text as parts; line breaks around images belong to the layout of the file."""
    first, *others = text.split(image)
    texts = [first, *(other.removeprefix("\n") for other in others)]
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(texts):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: Mapping[str, Any] | None = None,
    image_sizes: Sequence[tuple[int, int]] | None = None,
) -> ChatTokens:
    r"""Return a conversation in the chat template of a tokenizer, with a mask of the answers.

    An answer is all that the template writes for a message of the assistant after the prompt for
    it, with the token that ends the turn. Templates that mark answers with `{% generation %}`
    decide themselves.

    Args:
        tokenizer: A fast tokenizer of Hugging Face with a chat template, or the processor of a
            vision-language model.
        messages: Dicts with a `role` and whatever else the template reads, such as `content`;
            `chat_messages` returns them in the form that processors expect.
        template: Further variables of the template, like `{"tools": [...]}`.
        image_sizes: Width and height of each image, in the order of the conversation: the image
            token of the processor is repeated as `image_tokens` counts it. None leaves one token
            for each image.

    Raises:
        ConfigError: If the tokenizer does not tell where in a text its tokens are, or the processor
            cannot count the tokens of a size.
        SampleError: If the template writes answers in a way that cannot be told from the rest, or
            the conversation has another number of images.

    Example:
        >>> chat = [
        ...     {"role": "user", "content": "1 + 1?"},
        ...     {"role": "assistant", "content": "2."},
        ... ]
        >>> found = chat_tokens(tokenizer, chat)  # doctest: +SKIP
        >>> tokenizer.decode(found.tokens[found.loss_mask])  # doctest: +SKIP
        '2.<|im_end|>\n'
    """
    processor, tokenizer = tokenizer, getattr(tokenizer, "tokenizer", tokenizer)
    variables = dict(template or {})
    if processor is not tokenizer and processor.chat_template is not None:
        variables.setdefault("chat_template", processor.chat_template)
    # The variables that choose a template among several.
    chosen = {name: variables[name] for name in ("chat_template", "tools") if name in variables}
    if _MARKS_ANSWERS.search(tokenizer.get_chat_template(**chosen)):
        encoded = tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **variables
        )
        mask = encoded["assistant_masks"]
    elif not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} does not tell where in a text its tokens are; use a fast "
            "tokenizer, or a template that marks answers with {% generation %}"
        )
    else:
        conversation = _Conversation(tokenizer, messages, variables)
        encoded = tokenizer(
            conversation.text, add_special_tokens=False, return_offsets_mapping=True
        )
        starts, stops = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        mask = np.zeros(len(starts), np.bool_)
        for start, stop in conversation.answers():
            mask |= (starts < stop) & (stops > start)
    tokens, mask = np.array(encoded["input_ids"], np.int64), np.array(mask, np.bool_)
    if image_sizes is None:
        return ChatTokens(tokens, mask)
    repeats = _repeats(processor, tokens, image_sizes)
    return ChatTokens(tokens.repeat(repeats), mask.repeat(repeats))


def _repeats(
    processor: Any, tokens: NDArray[np.int64], image_sizes: Sequence[tuple[int, int]]
) -> NDArray[np.int64]:
    """Return how often each token occurs once images have all of theirs."""
    is_image = tokens == processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    if is_image.sum() != len(image_sizes):
        raise SampleError(
            f"the conversation has {is_image.sum()} image tokens {processor.image_token!r} for "
            f"{len(image_sizes)} images; expected one for each"
        )
    repeats = np.ones(len(tokens), np.int64)
    repeats[is_image] = [image_tokens(processor, width, height) for width, height in image_sizes]
    return repeats


class _Conversation:
    """A conversation as text, and where in it the answers are."""

    def __init__(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> None:
        self.tokenizer = tokenizer
        self.messages = list(messages)
        self.variables = variables
        self.text = self._render(self.messages)

    def answers(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each answer."""
        for number, message in enumerate(self.messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(self.messages[:number])
            stop = self._stop(number, before)
            if stop is None or not self.text.startswith(before):
                raise SampleError(
                    f"message {number} of {len(self.messages)}: the chat template of "
                    f"{type(self.tokenizer).__name__} writes what precedes it differently once it "
                    "follows, so its tokens cannot be told from the others; use a template that "
                    "marks answers with {% generation %}"
                )
            prompt = self._render(self.messages[:number], add_generation_prompt=True)
            # Some prompts end with the beginning of a reasoning, which this answer may lack.
            while not self.text.startswith(prompt):
                prompt = prompt[:-1]
            yield len(prompt), stop

    def _stop(self, number: int, before: str) -> int | None:
        """Return where a message ends; None if that cannot be told.

        Some templates leave the reasoning out of answers that are followed by others. Then the text
        that follows is known from the conversation without this message.
        """
        until = self._render(self.messages[: number + 1])
        if self.text.startswith(until):
            return len(until)
        without = self._render(self.messages[:number] + self.messages[number + 1 :])
        after = without[len(before) :]
        if not (without.startswith(before) and self.text.endswith(after)):
            return None
        return len(self.text) - len(after)

    def _render(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, **self.variables, **settings
        )
        return text


def image_tokens(processor: Any, width: int, height: int) -> int:
    """Return how many tokens a processor makes of an image of this size, without the image.

    With the sizes in the index (`FileStore.get_media_metadata`), packs are planned before any
    image is read.

    Args:
        processor: A processor of a vision-language model of Hugging Face.
        width: Width of the image in pixels.
        height: Height of the image in pixels.

    Raises:
        ConfigError: If the processor cannot count the tokens of a size.

    Example:
        >>> image_tokens(AutoProcessor.from_pretrained(model), 640, 480)  # doctest: +SKIP
        391
    """
    count = getattr(processor, "_get_num_multimodal_tokens", None)
    if count is None:
        raise ConfigError(
            f"{type(processor).__name__} does not count the tokens of an image size; processors of "
            "vision-language models do since transformers 4.53"
        )
    (tokens,) = count(image_sizes=[(height, width)])["num_image_tokens"]
    return int(tokens)
