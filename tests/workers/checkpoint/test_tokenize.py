"""Tokenization of long texts in pieces: the same tokens, early refusal, and bounded work per piece."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from tests.workers.properties import REPEATABLE
from vsched.errors import RequestRefused
from vsched_workers.checkpoint import tokenize
from vsched_workers.checkpoint.detokenize import TokenTable
from vsched_workers.checkpoint.tokenize import NFC_SHRINKS, TextTokenizer

CONTEXT = 2000
PIECES: tuple[str, ...] = (
    "word",
    "I'll",
    " ",
    "  ",
    "\n",
    " \n\n ",
    "\t",
    "12",
    ", ",
    "!\n",
    "<|im_end|>",
    "e\u0301",
)
PIECES += ("中文", "é", "\u212a", "\u00a0x", "<|im_", "end|>", "\u0301", "x\r\n", "한")


def backend_of(directory: Path, kind: str) -> Tokenizer:
    """Return the checkpoint's tokenizer, unchanged or with the normalizer and pre-tokenizer of a published family."""
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    splits = {"qwen": tokenize.GPT4_SPLIT, "llama": tokenize._LLAMA3_SPLIT}
    if kind == "qwen":
        backend.normalizer = normalizers.NFC()
    if kind in splits:
        split = pre_tokenizers.Split(Regex(splits[kind]), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    return backend


@pytest.fixture(scope="module", params=["checkpoint", "qwen", "llama", "smollm"])
def backend(request: pytest.FixtureRequest, checkpoints: Any) -> Tokenizer:
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
@REPEATABLE
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


def test_tokens_that_take_what_is_next_to_them_leave_no_bound(checkpoints: Any) -> None:
    for special in (
        AddedToken("<strips>", lstrip=True),
        AddedToken("<strips>", rstrip=True),
    ):
        backend = backend_of(checkpoints("nano25"), "qwen")
        backend.add_tokens([special])
        subject = text_tokenizer(backend)
        assert (subject.bytes_per_token_max, subject.cuts) == (0, False)


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
    ],
)
def test_a_tokenizer_of_another_kind_is_not_cut(
    checkpoints: Any, part: str, value: Any, bounded: bool
) -> None:
    backend = backend_of(checkpoints("nano25"), "qwen")
    setattr(backend, part, value)
    subject = text_tokenizer(backend)
    assert (bool(subject.bytes_per_token_max), subject.cuts) == (bounded, False)


def test_a_token_across_a_cut_forbids_cutting(checkpoints: Any) -> None:
    backend = backend_of(checkpoints("nano25"), "qwen")
    backend.add_tokens([AddedToken("two words", normalized=False)])
    assert not text_tokenizer(backend).cuts


def test_nfc_shrinks_no_text_more_than_assumed() -> None:
    """The longest spelling of each character, relative to its NFC: no text shrinks more than its characters."""
    ranges: tuple[range, ...] = (range(0xD800), range(0xE000, 0x10000), range(0x11000, 0x12000))
    ranges += (range(0x1D100, 0x1D200), range(0x2F800, 0x2FA20))
    characters = [chr(code) for codes in ranges for code in codes]
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
