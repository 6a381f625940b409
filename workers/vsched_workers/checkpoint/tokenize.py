"""Tokenization of prompts, piece by piece, with memory and time bounded by the context.

The `tokenizers` library takes up to 400 bytes of memory per byte of text, and returns the number of tokens only at the
end. So a text that cannot fit the context, whatever its content, is refused by its size; any other is split where the
split cannot change its tokens, and tokenized until it ends or exceeds the context.

A split lies between a letter or digit and a space or newline. The regular expressions listed below always end a match
there, without lookbehind or lookahead beyond it; NFC normalization changes neither side; and at load, the vocabulary is
searched for tokens that would span a split. Tokenizers of other kinds are not split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from vsched.errors import RequestRefused, limit_message

PIECE_CHARACTERS = 32 * 1024
"""Approximate size of a piece, which costs some 30 ms and 13 MB."""
STRETCH_BYTES_MIN = 1024 * 1024
STRETCH_BYTES_PER_TOKEN = 8
NFC_SHRINKS = 4
"""NFC normalization makes a text at most 3.5 times smaller in UTF-8: a test tries all characters."""

_CUT = re.compile(r"(?<=[A-Za-z0-9\u4e00-\u9fa5])(?=[ \n])")
_SPANNING = re.compile(r"[A-Za-z0-9\u4e00-\u9fa5][ \n]")
GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = GPT4_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
_WORD_SPLITS = frozenset({GPT4_SPLIT, _LLAMA3_SPLIT})
_CHARACTER_SPLITS = frozenset({r"\d", r"\p{N}"})


class TextTokenizer:
    """A byte-level tokenizer with a limit of context; all methods are thread-safe.

    Attributes:
        bytes_per_token_max: Maximum bytes of text per token; 0 if unknown.
        cuts: Whether long texts are tokenized in pieces.
    """

    def __init__(self, backend: Any, token_bytes: list[bytes], context_tokens: int) -> None:
        self._backend = backend
        self._context_tokens = context_tokens
        self._stretch_bytes_max = max(STRETCH_BYTES_MIN, STRETCH_BYTES_PER_TOKEN * context_tokens)
        self._normalizer = _kind(backend.normalizer)
        added = list(backend.get_added_tokens_decoder().values())
        whole = self._normalizer in {"", "NFC"} and backend.truncation is None
        plain = whole and not any(token.lstrip or token.rstrip for token in added)
        alphabet = {token for token in token_bytes if len(token) == 1}
        keeps_all = len(alphabet) == 256 and _keeps_every_byte(backend.pre_tokenizer)
        self.bytes_per_token_max = max(map(len, token_bytes)) if plain and keeps_all else 0
        self.cuts = (
            plain
            and _cuts_words(backend.pre_tokenizer)
            and not any(token.single_word or _SPANNING.search(token.content) for token in added)
        )

    def ids(self, text: str, *, before: int = 0) -> list[int]:
        """Return token ids, with special tokens recognized and none added; releases the GIL.

        `before` is the number of other tokens that the context has to hold.

        Raises:
            RequestRefused: When the tokens exceed the context, or a stretch without a split is too long.
        """
        self.check_size(text)
        ids: list[int] = []
        for piece in self._pieces(text):
            # Unlike `encode`, this releases the GIL and does not compute the unused offsets.
            encoding = self._backend.encode_batch_fast([piece], add_special_tokens=False)[0]
            if before + len(ids) + len(encoding) > self._context_tokens:
                raise self._exceeded(f"over {self._context_tokens} tokens")
            ids += encoding.ids
        return ids

    def check_size(self, *texts: str) -> None:
        """Check that texts can fit the context together, judging by their size.

        Raises:
            RequestRefused: With their minimum number of tokens.
        """
        most = self.bytes_per_token_max
        if not most:
            return
        size = kept = 0
        for text in texts:
            is_ascii = text.isascii()
            count = len(text) if is_ascii else len(text.encode(errors="surrogatepass"))
            size += count
            kept += count if is_ascii or not self._normalizer else -(-count // NFC_SHRINKS)
        tokens = -(-kept // most)
        if tokens > self._context_tokens:
            raise self._exceeded(f"at least {tokens} tokens in {size} bytes")

    def _exceeded(self, value: str) -> RequestRefused:
        message = limit_message(
            "the prompt is longer than the context",
            value=value,
            limit=f"{self._context_tokens} tokens of context",
            remedy="shorten the prompt",
        )
        return RequestRefused(message, code="context_exceeded")

    def _pieces(self, text: str) -> Iterator[str]:
        start = 0
        while start < len(text):
            end = self._next_cut(text, start)
            yield text[start:end]
            start = end

    def _next_cut(self, text: str, start: int) -> int:
        """Return the end of the piece that begins at `start`."""
        end = start + PIECE_CHARACTERS
        while self.cuts and end < len(text):
            # Step by step, so that other threads can run during a long search.
            found = _CUT.search(text, end, end + PIECE_CHARACTERS)
            if found is not None:
                end = found.start()
                break
            end += PIECE_CHARACTERS
        else:
            end = len(text)
        if end - start > PIECE_CHARACTERS:
            self._check_stretch(text[start:end])
        return end

    def _check_stretch(self, piece: str) -> None:
        size = len(piece.encode(errors="surrogatepass"))
        if size > self._stretch_bytes_max:
            message = limit_message(
                "a part of the prompt has no blank or newline after a letter or digit",
                value=f"{size} bytes",
                limit=f"{self._stretch_bytes_max} bytes",
                remedy="shorten it, or insert spaces",
            )
            raise RequestRefused(message, code="text_undivided")


def _state(part: Any) -> dict[str, Any]:
    """Return a part of a tokenizer as in tokenizer.json; empty if there is no such part."""
    state: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return state


def _kind(part: Any) -> str:
    return str(_state(part).get("type", ""))


def _stages(pre_tokenizer: Any) -> list[dict[str, Any]]:
    state = _state(pre_tokenizer)
    stages: list[dict[str, Any]] = state.get("pretokenizers", [state])
    return stages


def _regex(stage: dict[str, Any]) -> str:
    pattern = stage.get("pattern", {})
    return str(pattern.get("Regex", "")) if stage.get("behavior") == "Isolated" else ""


def _keeps_every_byte(pre_tokenizer: Any) -> bool:
    return all(
        stage.get("type") in {"ByteLevel", "Digits"}
        or (stage.get("type") == "Split" and stage.get("behavior") != "Removed")
        for stage in _stages(pre_tokenizer)
    )


def _cuts_words(pre_tokenizer: Any) -> bool:
    """Return whether a match always ends between a letter or digit and a space, independent of the other side."""
    divides = False
    for stage in _stages(pre_tokenizer):
        match stage.get("type"):
            case "ByteLevel" if not stage.get("add_prefix_space"):
                divides = divides or bool(stage.get("use_regex"))
            case "Split" if not stage.get("invert"):
                divides = divides or _regex(stage) in _WORD_SPLITS
                if _regex(stage) not in _WORD_SPLITS | _CHARACTER_SPLITS:
                    return False
            case "Digits":
                pass  # only concerns digits
            case _:
                return False
    return divides
