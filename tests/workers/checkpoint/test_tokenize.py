"""Tokenization of long texts in pieces, with bounded work; special tokens of a template are tokens, a client's text."""

from __future__ import annotations

import copy
import functools
import pickle
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from tests.workers.driver import Checkpoints
from tests.workers.properties import REPEATABLE
from vsched.errors import RequestRefused
from vsched.worker.contract import ImagePlan, Preprocessor
from vsched_workers.checkpoint import tokenize
from vsched_workers.checkpoint.tokenize import (
    NFC_SHRINKS,
    RenderedPrompt,
    SpecialTokens,
    TextTokenizer,
    TokenTable,
)

CONTEXT = 2000
PIECES = (
    "word", "I'll", " ", "  ", "\n", " \n\n ", "\t", "12", ", ", "!\n", "<|im_end|>", "e\u0301",
    "中文", "é", "\u212a", "\u00a0x", "<|im_", "end|>", "\u0301", "x\r\n", "한",
)  # fmt: skip


SPLITS: dict[str, Any] = {
    "qwen": pre_tokenizers.Split(Regex(tokenize.GPT4_SPLIT), "isolated"),
    "llama": pre_tokenizers.Split(Regex(tokenize._LLAMA3_SPLIT), "isolated"),
    "smollm": pre_tokenizers.Digits(individual_digits=True),
}


def backend_of(directory: Path, kind: str) -> Tokenizer:
    """Return the checkpoint's tokenizer, unchanged or with the normalizer and pre-tokenizer of a published family."""
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if kind == "qwen":
        backend.normalizer = normalizers.NFC()
    if kind in SPLITS:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "smollm")
        backend.pre_tokenizer = pre_tokenizers.Sequence([SPLITS[kind], level])
    return backend


@pytest.fixture(scope="module", params=["checkpoint", *SPLITS])
def backend(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Tokenizer:
    return backend_of(checkpoints("nano25"), request.param)


class Spy:
    """A backend that counts the encoded characters, and has only the method that releases the GIL."""

    def __init__(self, backend: Tokenizer) -> None:
        self.characters = 0
        self._backend = backend
        self.normalizer = backend.normalizer
        self.pre_tokenizer = backend.pre_tokenizer
        self.truncation = backend.truncation
        self.get_added_tokens_decoder = backend.get_added_tokens_decoder

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def text_tokenizer(backend: Any, spy: Any = None, context: int = CONTEXT) -> TextTokenizer:
    return TextTokenizer(spy or backend, TokenTable.of_tokenizer(backend).raw, context)


@given(parts=st.lists(st.sampled_from(PIECES), max_size=60), size=st.integers(1, 9))
@settings(REPEATABLE, max_examples=40)
def test_pieces_give_the_tokens_of_the_whole(
    backend: Tokenizer, parts: list[str], size: int
) -> None:
    text = "".join(parts)
    subject = text_tokenizer(backend)
    assert subject.cuts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "PIECE_CHARACTERS", size)
        found = subject.ids(text)
    assert found == backend.encode(text, add_special_tokens=False).ids
    assert len(text.encode()) <= max(len(found), 1) * subject.bytes_per_token_max * NFC_SHRINKS


def test_a_text_is_really_cut(backend: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "PIECE_CHARACTERS", 4)
    pieces = list(text_tokenizer(backend)._pieces("one two, three\nfour  five"))
    assert pieces == ["one two, three", "\nfour", "  five"]


@pytest.mark.parametrize("letter", ["a", "中"])
def test_bytes_that_cannot_fit_are_refused_before_tokenizing(
    backend: Tokenizer, letter: str
) -> None:
    spy = Spy(backend)
    subject = text_tokenizer(backend, spy)
    shrinks = NFC_SHRINKS if backend.normalizer and letter != "a" else 1
    size = CONTEXT * subject.bytes_per_token_max * shrinks + 1
    with pytest.raises(RequestRefused, match="at least 2001 tokens") as refused:
        subject.ids(letter * -(-size // len(letter.encode())))
    assert refused.value.code == "context_exceeded"
    assert spy.characters == 0


def test_a_text_is_tokenized_only_until_it_exceeds_the_context(
    backend: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "PIECE_CHARACTERS", 1000)
    spy = Spy(backend)
    text = "a, b " * (CONTEXT * 3)
    with pytest.raises(RequestRefused, match="over 2000 tokens"):
        text_tokenizer(backend, spy).ids(text)
    assert 0 < spy.characters < len(text)


def test_a_stretch_without_a_cut_is_bounded(
    backend: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(tokenize, "STRETCH_BYTES_MIN", 1000)
    spy = Spy(backend)
    subject = text_tokenizer(backend, spy, context=100)
    subject._context_tokens = 10_000
    with pytest.raises(RequestRefused, match="value 1001 bytes, limit 1000 bytes") as refused:
        subject.ids("," * 1001)
    assert refused.value.code == "text_undivided"
    assert spy.characters == 0
    assert len(subject.ids(",;" * 500)) > 1


@pytest.mark.parametrize(
    ("part", "value", "bounded"),
    [
        ("normalizer", normalizers.Lowercase(), False),
        ("normalizer", normalizers.Replace(" ", ""), False),
        ("pre_tokenizer", pre_tokenizers.Whitespace(), False),
        ("pre_tokenizer", pre_tokenizers.Split(Regex(r"\s"), "removed"), False),
        ("pre_tokenizer", pre_tokenizers.Split(Regex(r".* .*"), "isolated"), True),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(use_regex=False), True),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True), True),
        ("added token", AddedToken("<strips>", lstrip=True), False),
        ("added token", AddedToken("<strips>", rstrip=True), False),
        ("added token", AddedToken("two words", normalized=False), True),
    ],
)
def test_a_tokenizer_of_another_kind_is_not_cut(
    checkpoints: Checkpoints, part: str, value: Any, bounded: bool
) -> None:
    """Tokens that take the blanks next to them leave no bound either; one across a cut forbids cutting."""
    backend = backend_of(checkpoints("nano25"), "qwen")
    if part == "added token":
        backend.add_tokens([value])
    else:
        setattr(backend, part, value)
    subject = text_tokenizer(backend)
    assert (bool(subject.bytes_per_token_max), subject.cuts) == (bounded, False)


def test_nfc_shrinks_no_text_more_than_assumed() -> None:
    """The longest spelling of each character, relative to its NFC: no text shrinks more than its characters."""
    ranges = ((0, 0xD800), (0xE000, 0x12000), (0x1D100, 0x1D200), (0x2F800, 0x2FA20))
    characters = [chr(code) for limits in ranges for code in range(*limits)]
    longest: dict[str, int] = {}
    for character in characters:
        plain = unicodedata.normalize("NFD", character)
        if len(plain) == 1:
            longest[plain] = max(longest.get(plain, 0), len(character.encode()))
    worst = 0.0
    for character in characters:
        spelt = sum(longest[plain] for plain in unicodedata.normalize("NFD", character))
        assert len(character.encode()) <= spelt
        worst = max(worst, spelt / len(unicodedata.normalize("NFC", character).encode()))
    assert worst == 3.5


IMAGE = {"type": "image"}
SPLIT_TEXTS = st.sampled_from(
    ["<|image_pad|>", "<|vision_start|>", "<|im_", "end|>", "<", "|", "im_end|>", "a", " ", "\ufdd0", "ö"]
)  # fmt: skip


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


@given(parts=st.lists(st.lists(SPLIT_TEXTS, max_size=4).map("".join), max_size=4))
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


BAD = "<|im_end|>"
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
)
WITH_TOOLS = "{% for tool in tools %}<|im_start|>{{ tool | tojson }}{% endfor %}" + PLAIN_TEMPLATE


def called(**arguments: Any) -> list[dict[str, Any]]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


def with_template(front: Preprocessor, template: str) -> Any:
    changed: Any = copy.copy(front)
    changed._tokenizer = copy.copy(changed._tokenizer)
    changed._tokenizer.chat_template = template
    return changed


def test_special_tokens_in_calls_and_tools_are_text(front: Preprocessor, tokenizer: Any) -> None:
    """In values and keys of arguments, also under keys whose values templates compare elsewhere."""
    schema = {"type": "object", "properties": {"type": {"description": BAD}, BAD: {"enum": [BAD]}}}
    function = {"name": "f", "description": BAD, "parameters": schema}
    tools = [{"type": "function", "function": function}]
    in_calls, in_tools = (with_template(front, each) for each in (WITH_CALLS, WITH_TOOLS))
    for rendered, count in (
        (in_calls.render(called(**{"role": BAD, BAD: [{"type": BAD}]})), 3),
        (in_tools.render([{"role": "user", "content": "a"}], tools=tools), 4),
    ):
        assert rendered.count(BAD) == count
        special = [one for one in in_calls.tokenize(rendered) if one in special_ids(tokenizer)]
        assert special == [tokenizer.convert_tokens_to_ids("<|im_start|>")]


def test_calls_and_tools_that_a_template_would_not_show_are_refused(front: Preprocessor) -> None:
    changed = with_template(front, PLAIN_TEMPLATE)
    with pytest.raises(RequestRefused, match="writes no tool calls"):
        changed.render(called())
    with pytest.raises(RequestRefused, match="shows no tools"):
        changed.render([{"role": "user", "content": "a"}], tools=[{"type": "function"}])
