"""Incremental detokenization: the same text for any split, also with incomplete characters."""

from __future__ import annotations

import codecs
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from vsched_workers.checkpoint.detokenize import ByteDetokenizer, TokenTable

BYTES = [bytes([byte]) for byte in range(256)]
WORDS = [*BYTES, " wörd".encode(), "日本".encode(), "日".encode()[:2], b"\xff\xfe", b""]


@pytest.mark.parametrize("seed", range(20))
def test_detokenizer_gives_what_the_codec_gives(seed: int) -> None:
    rng = random.Random(seed)
    detokenizer = ByteDetokenizer(TokenTable(WORDS, WORDS))
    codec = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for _ in range(200):
        likely = range(256, len(WORDS)) if rng.random() < 0.5 else range(len(WORDS))
        token_ids = rng.choices([*likely, -1, 10_000], k=rng.choice((1, 1, 1, 2, 5)))
        joined = b"".join(WORDS[one] for one in token_ids if 0 <= one < len(WORDS))
        assert detokenizer.push(token_ids) == codec.decode(joined)
    assert detokenizer.flush() == codec.decode(b"", final=True)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["<|tool_call>", "call:", "<tool_call|>", "<|turn>"], "<|tool_call>call:<tool_call|>"),
        (["<|channel|>", "<|end|>", "<|return|>"], "<|channel|><|end|>"),
        (["<|end|>", "<|message|>", "a"], "a"),
    ],
)
def test_texts_show_the_marks_of_calls_and_of_channels_if_there_are_any(
    tokens: list[str], text: str
) -> None:
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(each, special=each.startswith("<")) for each in tokens])
    table = TokenTable.of_tokenizer(backend)
    assert table.decode([backend.get_vocab()[each] for each in tokens]) == text
