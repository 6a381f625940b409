"""Incremental decoding: the same text however it is cut, and whether or not characters are whole."""

from __future__ import annotations

import codecs
import random

import pytest

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
