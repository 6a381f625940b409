"""Turns token ids into text as they come, in constant time a token.

A byte-level tokenizer writes each byte of the text as one character of its vocabulary, so a token *is* a byte
string and the text of a sequence is the concatenation, decoded as UTF-8. An incremental decoder therefore holds
back at most three bytes; nothing is ever decoded twice, unlike in the usual scheme that decodes a window of tokens
at each step.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from vsched.errors import CheckpointError


def _byte_characters() -> dict[str, int]:
    """Map each character of the byte-level alphabet to its byte.

    Printable bytes stand for themselves, the others for characters from 256 on, in order.

    Source: the byte-level alphabet of GPT-2, which every byte-level BPE tokenizer shares.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return characters


class TokenTable:
    """The bytes of every token of a vocabulary.

    Attributes:
        raw: Bytes of each token, special tokens included.
        text: The same, but nothing for special tokens, which no text shows.
    """

    __slots__ = ("raw", "text")

    def __init__(self, raw: list[bytes], text: list[bytes]) -> None:
        self.raw = raw
        self.text = text

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> TokenTable:
        """Build the table of a `tokenizers.Tokenizer`.

        Raises:
            CheckpointError: When the tokenizer is not a byte-level one.
        """
        decoder = tokenizer.decoder
        if decoder is None or "ByteLevel" not in repr(decoder):
            raise CheckpointError(
                "tokenizer.json: only byte-level tokenizers are supported. "
                "Remedy: serve a checkpoint of a supported family."
            )
        characters = _byte_characters()
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        size = max(vocabulary.values(), default=-1) + 1
        raw = [b""] * size
        for token, index in vocabulary.items():
            try:
                raw[index] = bytes([characters[character] for character in token])
            except KeyError:
                raw[index] = token.encode()
        for index, token in added.items():
            raw[index] = token.content.encode()
        text = list(raw)
        for index, token in added.items():
            if token.special:
                text[index] = b""
        return cls(raw, text)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token; nothing for an id that the tokenizer does not know."""
        return self.raw[token_id] if 0 <= token_id < len(self.raw) else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, special tokens skipped."""
        text, size = self.text, len(self.text)
        joined = b"".join([text[index] for index in token_ids if 0 <= index < size])
        return joined.decode("utf-8", errors="replace")


class ByteDetokenizer:
    """The incremental decoder of one request."""

    __slots__ = ("_decoder", "_is_half", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_half = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make certain."""
        text, size = self._table.text, len(self._table.text)
        joined = b"".join([text[index] for index in token_ids if 0 <= index < size])
        if not self._is_half:
            try:
                return joined.decode()  # whole characters, as nearly always: a fifth of the time
            except UnicodeDecodeError:
                pass
        decoded = self._decoder.decode(joined)
        self._is_half = bool(self._decoder.getstate()[0])
        return decoded

    def flush(self) -> str:
        """Return what was held back: a replacement character for half a character, else nothing."""
        self._is_half = False
        return self._decoder.decode(b"", final=True)
