"""Special tokens in prompts: a chat template's are tokens, in a client's text they are plain text.

A rendered prompt is one string in which both look alike. So before the template runs, a mark is inserted into every
special token in a client's strings, and into every end of a string that may become a special token together with the
string that follows. Afterwards the marks are removed, and their positions are kept with the text. A special token
without a mark is the template's own.

The text between the template's tokens is then encoded by a twin of the tokenizer that does not recognize special
tokens: the same ids as from transformers with `split_special_tokens`. Most prompts have no mark, and are encoded
directly.

A prompt that is not a rendered template begins like every text of the tokenizer: with the BOS token, if there is one.
Templates write it themselves.

Added tokens that the tokenizer does not call special, such as `<tool_call>`, are part of what models write and clients
send back: they stay tokens everywhere.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tokenizers import Tokenizer

from vsched_workers.checkpoint.tokenize import TextTokenizer

_MARK = "\ufdd0"
"""Not a character of any text: Unicode reserves it for internal use. In a client's text it is doubled."""
_NAMES = frozenset({"role", "type"})
"""Keys whose values templates compare with names of their own."""


class RenderedPrompt(str):
    """A prompt rendered by a template; `marks` are the sorted positions at which special tokens are a client's text."""

    marks: tuple[int, ...]

    def __new__(cls, text: str, marks: tuple[int, ...] = ()) -> Self:
        """Return the text with its marks."""
        made = super().__new__(cls, text)
        made.marks = marks
        return made


class SpecialTokens:
    """The special tokens of one tokenizer; immutable."""

    def __init__(self, backend: Tokenizer, token_bytes: list[bytes], context_tokens: int) -> None:
        added = backend.get_added_tokens_decoder()
        self._ids = {one.content: token_id for token_id, one in added.items() if one.special}
        names = sorted(self._ids, key=len, reverse=True)
        self._beginning = os.path.commonprefix(names)  # noqa: RUF071 - characters, not path components
        self._pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._longest = max(map(len, names), default=0)
        self._prefixes = {name[:end] for name in names for end in range(1, len(name))}
        self._whole = TextTokenizer(backend, token_bytes, context_tokens)
        twin = _without_special_tokens(backend)
        self._as_text = TextTokenizer(twin, token_bytes, context_tokens)
        self._first = first_tokens(backend)
        self._first_text = "".join(str(backend.id_to_token(token)) for token in self._first)

    def ids_of_text(self, text: str) -> list[int]:
        """Return the token ids of a text that stands between special tokens."""
        return self._as_text.ids(text)

    def check_size(self, *texts: str) -> None:
        """Check that texts can fit the context together.

        Raises:
            RequestRefused: As `TextTokenizer.check_size`.
        """
        self._whole.check_size(*texts)

    def mark(self, value: Any) -> Any:
        """Return a client's value for the template, with marks in all strings that may contain special tokens."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {key: self._member(key, one) for key, one in value.items()}
        return [self.mark(one) for one in value] if isinstance(value, list) else value

    def _member(self, key: str, value: Any) -> Any:
        if key == "arguments":
            return self.mark_data(value)
        return value if key in _NAMES else self.mark(value)

    def mark_data(self, value: Any) -> Any:
        """Return a tool or the arguments of a call with marks: their keys are a client's text, too."""
        if isinstance(value, Mapping):
            return {self._marked(key): self.mark_data(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.mark_data(one) for one in value]
        return self._marked(value) if isinstance(value, str) else value

    def _marked(self, text: str) -> str:
        if _MARK in text:
            text = text.replace(_MARK, _MARK * 2)
        if self._beginning in text:
            text = self._pattern.sub(lambda found: f"{found[0][0]}{_MARK}{found[0][1:]}", text)
        cut = max(len(text) - self._longest + 1, 0)
        ends = [start for start in range(cut, len(text)) if text[start:] in self._prefixes]
        for start in reversed(ends):
            text = f"{text[: start + 1]}{_MARK}{text[start + 1 :]}"
        return text

    def unmark(self, rendered: str) -> RenderedPrompt:
        """Return the rendered text without marks, together with their positions."""
        if _MARK not in rendered:
            return RenderedPrompt(rendered)
        pieces: list[str] = []
        marks: list[int] = []
        length = 0
        # Every second piece is a run of marks: each pair of them was one in a client's text.
        for index, piece in enumerate(re.split(f"({_MARK}+)", rendered)):
            kept = piece
            if index % 2:
                if len(piece) % 2:
                    marks.append(length)
                kept = _MARK * (len(piece) // 2)
            pieces.append(kept)
            length += len(kept)
        return RenderedPrompt("".join(pieces), tuple(marks))

    def ids(self, text: str, *, plain: Sequence[str] = ()) -> list[int]:
        """Return token ids without additions; special tokens with a mark, and those named in `plain`, are text.

        A prompt that is not a rendered template gets the BOS tokens, which a template would have written.

        Raises:
            RequestRefused: As `TextTokenizer.ids`.
        """
        ids: list[int] = []
        marks: tuple[int, ...] = ()
        if isinstance(text, RenderedPrompt):
            marks = text.marks
        elif not text.startswith(self._first_text):
            ids += self._first
        if not marks and not any(each in text for each in plain):
            return ids + self._whole.ids(text, before=len(ids))
        self._whole.check_size(text)
        start = 0
        for found in self._pattern.finditer(text):
            first = bisect_left(marks, found.start() + 1)
            if found[0] in plain or (first < len(marks) and marks[first] <= found.end()):
                continue
            ids += self._as_text.ids(text[start : found.start()], before=len(ids) + 1)
            ids.append(self._ids[found[0]])
            start = found.end()
        return ids + self._as_text.ids(text[start:], before=len(ids))


def first_tokens(backend: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer adds before every text."""
    whole = backend.encode("a", add_special_tokens=True).ids
    own = backend.encode("a", add_special_tokens=False).ids
    places = range(len(whole) - len(own) + 1)
    found = (whole[:start] for start in places if whole[start : start + len(own)] == own)
    return next(found, [])


def _without_special_tokens(backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer of the same, shared model that treats special tokens as text."""
    twin = Tokenizer(backend.model)
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        twin.pre_tokenizer = backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([added[token_id] for token_id in sorted(added)])
    twin.encode_special_tokens = True
    return twin
