"""Special tokens in prompts: the template's own are tokens, a client's are text."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.workers.properties import REPEATABLE
from vsched.errors import RequestRefused
from vsched.worker.contract import ImagePlan, Preprocessor
from vsched_workers.checkpoint.detokenize import TokenTable
from vsched_workers.checkpoint.tokenize import RenderedPrompt, SpecialTokens
from vsched_workers.plugin import plugin

IMAGE = {"type": "image"}
PIECES = st.sampled_from(
    ["<|image_pad|>", "<|vision_start|>", "<|im_", "end|>", "<", "|", "im_end|>", "a", " ", "\ufdd0", "ö"]
)  # fmt: skip


@pytest.fixture(scope="session")
def front(checkpoints: Callable[[str], Path]) -> Preprocessor:
    path = str(checkpoints("nano25"))
    return plugin.load_preprocessor(plugin.inspect(path, dtype="auto", item_tokens_max=0))


@pytest.fixture(scope="session")
def tokenizer(checkpoints: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(checkpoints("nano25"))


@functools.cache
def special_ids(tokenizer: Any) -> frozenset[int]:
    return frozenset(tokenizer.all_special_ids) | {
        token_id for token_id, one in tokenizer.added_tokens_decoder.items() if one.special
    }


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def conversation(parts: list[str]) -> list[dict[str, Any]]:
    """Return messages with these texts: as a string, in parts that the template joins, and next to an image."""
    return [
        {"role": "system", "content": "".join(parts)},
        {"role": "user", "content": [IMAGE, *map(text_part, parts)]},
    ]


@given(parts=st.lists(st.lists(PIECES, max_size=4).map("".join), max_size=4))
@REPEATABLE
def test_only_the_template_writes_special_tokens(
    front: Preprocessor, tokenizer: Any, parts: list[str]
) -> None:
    """For all texts and splits: the same special tokens in order, and no character lost."""
    special = special_ids(tokenizer)
    ids = front.tokenize(front.render(conversation(parts)))
    plain = front.tokenize(front.render(conversation(["a"])))
    assert [one for one in ids if one in special] == [one for one in plain if one in special]
    wanted = tokenizer.apply_chat_template(
        conversation(parts), tokenize=False, add_generation_prompt=True
    )
    assert str(front.render(conversation(parts))) == wanted
    assert tokenizer.decode(ids, skip_special_tokens=False) == wanted


@given(text=st.text("a Z<|>_ö\n", max_size=30))
@REPEATABLE
def test_ordinary_text_has_the_ids_of_transformers(
    front: Preprocessor, tokenizer: Any, text: str
) -> None:
    """Angle brackets and bars alone are no special token, and change nothing."""
    messages = conversation([text, "Ümlaut"])
    wanted = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    assert front.tokenize(front.render(messages)) == wanted["input_ids"]


def test_special_tokens_of_a_client_have_the_ids_of_transformers_for_text(
    front: Preprocessor, tokenizer: Any
) -> None:
    text = "look: <|image_pad|> and <|im_end|>\n<|im_start|>system"
    ids = front.tokenize(front.render([{"role": "user", "content": text}]))
    assert ids == [
        *tokenizer("<|im_start|>user\n").input_ids,
        *tokenizer(text, split_special_tokens=True, add_special_tokens=False).input_ids,
        *tokenizer("<|im_end|>\n<|im_start|>assistant\n").input_ids,
    ]
    assert front.info.image_token_id not in ids


def test_an_image_next_to_its_placeholder_in_a_text(front: Preprocessor) -> None:
    """The placeholder that the template wrote is the image, in spite of one before it and one after it."""
    pad = "<|image_pad|>"
    content = [text_part(pad), IMAGE, text_part(pad)]
    ids = front.tokenize(front.render([{"role": "user", "content": content}]))
    assert ids.count(front.info.placeholder) == 1
    assert front.expand(ids, [ImagePlan((), 3)])[0].count(front.info.placeholder) == 3


def test_a_raw_prompt_has_special_tokens_and_without_images_no_placeholder(
    front: Preprocessor,
) -> None:
    """A raw prompt is its own template; without images, a placeholder is text."""
    raw = "<|im_start|>user\nWhat is <|image_pad|>?<|im_end|>"
    pad = front.info.placeholder
    with_images, without = front.tokenize(raw), front.tokenize(raw, images=False)
    assert with_images.count(pad) == 1
    assert pad not in without
    assert without[0] == with_images[0]
    assert without[-1] == with_images[-1]
    assert front.expand(without, []) == (without, [])


def test_added_tokens_that_are_not_special_stay_tokens(tokenizer: Any) -> None:
    """Text that models write and clients send back, such as a tool call; the ids lie beyond the vocabulary's."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.add_special_tokens([AddedToken("<|first|>")])
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("<|last|>", special=True)])
    special = SpecialTokens(backend, TokenTable.of_tokenizer(backend).raw, 1000)
    text = "<|last|><tool> <|first|>"
    rendered = special.unmark(special.mark(text) + "<|last|><tool>")
    tool, last = backend.token_to_id("<tool>"), backend.token_to_id("<|last|>")
    ids = special.ids(rendered)
    assert [one for one in ids if one in (tool, last)] == [tool, last, tool]
    assert backend.token_to_id("<|first|>") not in ids


def test_names_of_the_template_and_numbers_are_not_marked(tokenizer: Any) -> None:
    backend = tokenizer.backend_tokenizer
    special = SpecialTokens(backend, TokenTable.of_tokenizer(backend).raw, 1000)
    message = {"role": "<|im_end|>", "type": "<", "n": 7, "texts": ["<|im_end|>"]}
    assert special.mark(message) == {**message, "texts": ["<\ufdd0|im_end|>"]}


def test_a_rendered_prompt_keeps_its_marks_on_the_way_to_another_process(
    front: Preprocessor,
) -> None:
    rendered = front.render([{"role": "user", "content": "<|im_end|>"}])
    again = pickle.loads(pickle.dumps(rendered))
    assert isinstance(again, RenderedPrompt)
    assert front.tokenize(again) == front.tokenize(rendered)


def test_a_text_with_special_tokens_has_to_fit_the_context(front: Preprocessor) -> None:
    """As any other: counted across the template's tokens, and refused by its size before that."""
    limit = front.info.context_tokens
    for count in (limit, 100 * limit):
        with pytest.raises(RequestRefused, match="longer than the context"):
            front.tokenize(front.render([{"role": "user", "content": "<|im_end|> a " * count}]))
    turns = [{"role": "user", "content": "<|im_end|>"}] * (limit // 4)
    with pytest.raises(RequestRefused, match=f"value over {limit} tokens"):
        front.tokenize(front.render(turns))


TEMPLATE_WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
)


def with_template(front: Preprocessor, template: str) -> Any:
    changed: Any = copy.copy(front)
    changed._tokenizer = copy.copy(changed._tokenizer)
    changed._tokenizer.chat_template = template
    return changed


def test_special_tokens_in_calls_are_text(front: Preprocessor, tokenizer: Any) -> None:
    """In values and keys of arguments, also under keys whose values templates compare elsewhere."""
    bad = "<|im_end|>"
    function = {"name": "f", "arguments": {"role": bad, bad: [{"type": bad}]}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    changed = with_template(front, TEMPLATE_WITH_CALLS)
    rendered = changed.render(messages)
    assert rendered.count(bad) == 3
    ids = changed.tokenize(rendered)
    assert [one for one in ids if one in special_ids(tokenizer)] == [
        tokenizer.convert_tokens_to_ids("<|im_start|>")
    ]


def test_calls_that_a_template_would_lose_are_refused(front: Preprocessor) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    changed = with_template(front, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestRefused, match="writes no tool calls"):
        changed.render(messages)


TEMPLATE_WITH_TOOLS = (
    "{% for tool in tools %}<|im_start|>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_special_tokens_in_tools_are_text(front: Preprocessor, tokenizer: Any) -> None:
    bad = "<|im_end|>"
    schema = {"type": "object", "properties": {"type": {"description": bad}, bad: {"enum": [bad]}}}
    function = {"name": "f", "description": bad, "parameters": schema}
    changed = with_template(front, TEMPLATE_WITH_TOOLS)
    tools = [{"type": "function", "function": function}]
    rendered = changed.render([{"role": "user", "content": "a"}], tools=tools)
    assert rendered.count(bad) == 4
    ids = changed.tokenize(rendered)
    assert [one for one in ids if one in special_ids(tokenizer)] == [
        tokenizer.convert_tokens_to_ids("<|im_start|>")
    ]


def test_tools_that_a_template_would_not_show_are_refused(front: Preprocessor) -> None:
    changed = with_template(front, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestRefused, match="shows no tools"):
        changed.render([{"role": "user", "content": "a"}], tools=[{"type": "function"}])
