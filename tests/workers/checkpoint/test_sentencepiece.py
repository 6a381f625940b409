"""Tokenizers of SentencePiece, and of tiktoken: the ids of their own libraries, and the text of a token as bytes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from vsched.errors import CheckpointError
from vsched_workers.checkpoint.detokenize import ByteDetokenizer, TokenTable
from vsched_workers.checkpoint.random_init import SMALL_TEXT
from vsched_workers.checkpoint.special_tokens import RenderedPrompt, SpecialTokens
from vsched_workers.checkpoint.tokenizer_files import load_tokenizer

sentencepiece: Any = pytest.importorskip("sentencepiece")
TEXTS = ["The red square.", "Zwei  Zeilen\nund größer", "日本 🎉", "12 + 34"]
WORDS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint's folder with the tokenizer of an early Llama: SentencePiece alone."""
    path = tmp_path_factory.mktemp("llama")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SMALL_TEXT.splitlines()),
        model_prefix=str(path / "tokenizer"),
        model_type="bpe",
        vocab_size=WORDS,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (path / "tokenizer.vocab").unlink()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **tokens}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder, vocab_size=WORDS, chat_template="")


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_is_converted_token_by_token(tokenizer: Any, own: Any, text: str) -> None:
    backend = tokenizer.backend_tokenizer
    ids = backend.encode(text, add_special_tokens=False).ids
    assert ids == own.encode(text)
    assert TokenTable.of_tokenizer(backend).decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_is_decoded_as_it_comes(tokenizer: Any, own: Any, text: str) -> None:
    """The blank before a text is the text's own where it goes on from a prompt."""
    detokenizer = ByteDetokenizer(TokenTable.of_tokenizer(tokenizer.backend_tokenizer))
    pieces = [detokenizer.push([token]) for token in own.encode(text)]
    assert "".join(pieces) + detokenizer.flush() == f" {text}"


def test_prompts_begin_as_the_tokenizer_begins_texts(tokenizer: Any) -> None:
    """A template writes the first token itself; so may whoever sends a prompt."""
    backend = tokenizer.backend_tokenizer
    special = SpecialTokens(backend, TokenTable.of_tokenizer(backend).raw, 100)
    plain = backend.encode("red", add_special_tokens=False).ids
    assert special.ids("red") == [1, *plain] == tokenizer("red").input_ids
    assert special.ids("<s>red")[0] == 1
    assert special.ids("<s>red").count(1) == 1
    assert special.ids(RenderedPrompt("red")) == plain
    assert special.ids(special.unmark("red")) == plain


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (decoders.Metaspace(), "a b"),
        (decoders.Metaspace(prepend_scheme="never"), " a b"),
        (
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            ),
            " a b",
        ),
        (
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
            "a b",
        ),
    ],
)
def test_blanks_are_written_in_several_ways(decoder: Any, text: str) -> None:
    backend = Tokenizer(models.BPE({"▁a": 0, "▁b": 1, "<0x41>": 2}, []))
    backend.decoder = decoder
    table = TokenTable.of_tokenizer(backend)
    assert table.decode([0, 1]) == text == backend.decode([0, 1])
    assert table.decode([0, 2]).strip() == backend.decode([0, 2]).strip()


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Fuse()])
def test_other_ways_to_join_tokens_are_refused(decoder: Any) -> None:
    backend = Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(CheckpointError, match="joined in a way that is not supported.*Remedy"):
        TokenTable.of_tokenizer(backend)


def test_tiktoken_is_converted(tmp_path: Path) -> None:
    tiktoken: Any = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {piece: 256 + index for index, piece in enumerate((b"re", b" re", b" red", b"12"))}
    lines = [b"%s %d" % (base64.b64encode(piece), rank) for piece, rank in ranks.items()]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eot|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    backend = load_tokenizer(tmp_path, vocab_size=300, chat_template="").backend_tokenizer
    pattern = r"\p{L}+| \p{L}+|\p{N}+|."
    known = tiktoken.Encoding("known", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in ("a red 12", "größer"):
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ids == known.encode(text)
        assert TokenTable.of_tokenizer(backend).decode(ids) == text
