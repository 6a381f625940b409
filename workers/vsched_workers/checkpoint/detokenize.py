"""Incremental detokenization, in constant time per token.

A byte-level tokenizer represents each byte of the text by one character of its vocabulary; SentencePiece represents a
space by `▁` and bytes without a character by `<0x0A>`. So a token *is* a byte string, and the text of a sequence is the
concatenation, decoded as UTF-8. An incremental decoder therefore holds back at most three bytes; nothing is decoded
twice, unlike in the common scheme that decodes a window of tokens at each step.

The space that a SentencePiece tokenizer adds before a text is removed when a whole text is decoded. Generated text
continues a prompt, so its first space stays.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from vsched.errors import CheckpointError


def _byte_characters() -> dict[str, int]:
    """Map each character of the byte-level alphabet to its byte.

    Printable bytes are represented by themselves, the others by characters from 256 on, in order. Source: the
    byte-level alphabet of GPT-2, which all byte-level BPE tokenizers use.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return characters


_BYTE_CHARACTERS = _byte_characters()

MARKS = frozenset(
    [
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[THINK]",
        "[/THINK]",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<|channel>",
        "<channel|>",
    ]
)
"""Special tokens that are part of the text: in some tokenizers, marks of tool calls and reasoning are special."""

CHANNEL = "<|channel|>"
CHANNEL_MARKS = frozenset([CHANNEL, "<|start|>", "<|message|>", "<|constrain|>", "<|end|>"])
"""Likewise, for tokenizers with channels: others use some of these for other purposes."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_CHARACTERS[character] for character in token])
    except KeyError:
        return token.encode()


def _spelling(tokenizer: Any) -> tuple[Callable[[str], bytes], bool]:
    """Return the conversion of a token to bytes, and whether the tokenizer adds a space before a text.

    Raises:
        CheckpointError: When the tokenizer has another kind of decoder.
    """
    state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    stages = {stage.get("type"): stage for stage in state.get("decoders", [state])}
    if "ByteLevel" in stages:
        return _byte_level, False
    replace = stages.get("Replace", {})
    blank = replace.get("pattern", {}).get("String") if replace.get("content") == " " else None
    blank = stages.get("Metaspace", {}).get("replacement", blank)
    unknown = sorted(
        map(str, stages.keys() - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
    )
    if unknown or not blank:
        raise CheckpointError(
            f"tokenizer.json: tokens are joined in a way that is not supported ({', '.join(unknown) or 'none'}). "
            "Supported: byte-level tokenizers, and those of SentencePiece. "
            "Remedy: serve a checkpoint with such a tokenizer."
        )
    has_bytes = "ByteFallback" in stages

    def spelled(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        return bytes([int(byte[1], 16)]) if byte is not None else token.replace(blank, " ").encode()

    begins = stages.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    return spelled, begins or "Strip" in stages


class TokenTable:
    """The bytes of every token of a vocabulary.

    Attributes:
        raw: Bytes of each token, including special tokens.
        text: The same, but empty for special tokens, which are not part of the text, except `MARKS`.
        begins_blank: Whether the tokenizer adds a space before every text.
    """

    __slots__ = ("begins_blank", "raw", "text")

    def __init__(self, raw: list[bytes], text: list[bytes], *, begins_blank: bool = False) -> None:
        self.raw = raw
        self.text = text
        self.begins_blank = begins_blank

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, *, shown: str = "") -> TokenTable:
        """Build the table of a `tokenizers.Tokenizer`; special tokens that occur in `shown` are kept as text, too.

        Raises:
            CheckpointError: When the tokenizer is neither byte-level nor SentencePiece.
        """
        spelled, begins_blank = _spelling(tokenizer)
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        size = max(vocabulary.values(), default=-1) + 1
        raw = [b""] * size
        for token, index in vocabulary.items():
            raw[index] = spelled(token)
        for index, token in added.items():
            raw[index] = token.content.encode()
        text = list(raw)
        marks = MARKS | CHANNEL_MARKS if CHANNEL in vocabulary else MARKS
        for index, token in added.items():
            if token.special and token.content not in marks and token.content not in shown:
                text[index] = b""
        return cls(raw, text, begins_blank=begins_blank)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an unknown id."""
        return self.raw[token_id] if 0 <= token_id < len(self.raw) else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the whole text of these tokens, without special tokens."""
        text, size = self.text, len(self.text)
        joined = b"".join([text[index] for index in token_ids if 0 <= index < size])
        decoded = joined.decode("utf-8", errors="replace")
        return decoded.removeprefix(" ") if self.begins_blank else decoded


class ByteDetokenizer:
    """The incremental decoder of one request."""

    __slots__ = ("_decoder", "_is_half", "_text")

    def __init__(self, table: TokenTable, *, special: bool = False) -> None:
        """Begin; `special` makes special tokens part of the text."""
        self._text = table.raw if special else table.text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_half = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is complete after these tokens."""
        text, size = self._text, len(self._text)
        joined = b"".join([text[index] for index in token_ids if 0 <= index < size])
        if not self._is_half:
            try:
                return joined.decode()  # whole characters, as nearly always, in a fifth of the time
            except UnicodeDecodeError:
                pass
        decoded = self._decoder.decode(joined)
        self._is_half = bool(self._decoder.getstate()[0])
        return decoded

    def flush(self) -> str:
        """Return the remaining text: a replacement character for an incomplete character, or nothing."""
        self._is_half = False
        return self._decoder.decode(b"", final=True)
