"""Tokenization of prompts, piece by piece, with memory and time bounded by the context; incremental detokenization.

The `tokenizers` library takes up to 400 bytes of memory per byte of text, and returns the number of tokens only at the
end. So a text that cannot fit the context, whatever its content, is refused by its size; any other is split where the
split cannot change its tokens, and tokenized until it ends or exceeds the context.

A split lies between a letter or digit and a space or newline. The regular expressions listed below always end a match
there, without lookbehind or lookahead beyond it; NFC normalization changes neither side; and at load, the vocabulary is
searched for tokens that would span a split. Tokenizers of other kinds are not split.

**Special tokens.** A chat template's are tokens, in a client's text they are plain text. A rendered prompt is one
string in which both look alike. So before the template runs, a mark is inserted into every special token in a client's
strings, and into every end of a string that may become a special token together with the string that follows.
Afterwards the marks are removed, and their positions are kept with the text. A special token without a mark is the
template's own.

The text between the template's tokens is then encoded by a twin of the tokenizer that does not recognize special
tokens: the same ids as from transformers with `split_special_tokens`. Most prompts have no mark, and are encoded
directly. A prompt that is not a rendered template begins like every text of the tokenizer: with the BOS token, if there
is one. Templates write it themselves.

Added tokens that the tokenizer does not call special, such as `<tool_call>`, are part of what models write and clients
send back: they stay tokens everywhere.

**Detokenization**, in constant time per token. A byte-level tokenizer represents each byte of the text by one character
of its vocabulary; SentencePiece represents a space by `▁` and bytes without a character by `<0x0A>`. So a token *is* a
byte string, and the text of a sequence is the concatenation, decoded as UTF-8. An incremental decoder therefore holds
back at most three bytes; nothing is decoded twice, unlike in the common scheme that decodes a window of tokens at each
step. The space that a SentencePiece tokenizer adds before a text is removed when a whole text is decoded. Generated
text continues a prompt, so its first space stays.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from tokenizers import Tokenizer

from vsched.errors import CheckpointError, RequestRefused

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
        return RequestRefused.of_limit(
            "the prompt is longer than the context",
            value=value,
            limit=f"{self._context_tokens} tokens of context",
            remedy="shorten the prompt",
            code="context_exceeded",
        )

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
            raise RequestRefused.of_limit(
                "a part of the prompt has no blank or newline after a letter or digit",
                value=f"{size} bytes",
                limit=f"{self._stretch_bytes_max} bytes",
                remedy="shorten it, or insert spaces",
                code="text_undivided",
            )


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
