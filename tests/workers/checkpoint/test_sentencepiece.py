"""SentencePiece and tiktoken tokenizers: the ids of their own libraries, the bytes of tokens, grammars."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models

from tests.each_case import each_case
from tests.workers.checkpoint.draws import drawn, encoded
from tests.workers.driver import inspect
from vsched.api.structured_outputs import constraint_from_schema
from vsched.errors import CheckpointError
from vsched.types import FinishReason
from vsched_workers.checkpoint.grammars import TokenGrammars, load_grammars
from vsched_workers.checkpoint.random_init import SMALL_TEXT
from vsched_workers.checkpoint.tokenize import (
    ByteDetokenizer,
    RenderedPrompt,
    SpecialTokens,
    TokenTable,
)
from vsched_workers.checkpoint.tokenizer_files import load_tokenizer
from vsched_workers.plugin import TRAINED

sentencepiece: Any = pytest.importorskip("sentencepiece")
TEXTS = ["The red square.", "Zwei  Zeilen\nund größer", "日本 🎉", "12 + 34"]
WORDS = 380


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint's folder with the tokenizer of an early Llama: SentencePiece alone, of either kind."""
    path = tmp_path_factory.mktemp(request.param)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SMALL_TEXT.splitlines()),
        model_prefix=str(path / "tokenizer"),
        model_type=request.param,
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
def table(tokenizer: Any) -> TokenTable:
    return TokenTable.of_tokenizer(tokenizer.backend_tokenizer)


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("folder", ["bpe"], indirect=True, scope="module")  # Llama's kind
@each_case("text", TEXTS)
def test_sentencepiece_is_converted_token_by_token(
    tokenizer: Any, table: TokenTable, own: Any, text: str
) -> None:
    """The space before a text is part of the text if it continues a prompt."""
    backend = tokenizer.backend_tokenizer
    ids = backend.encode(text, add_special_tokens=False).ids
    assert ids == own.encode(text)
    assert table.decode(ids) == text
    detokenizer = ByteDetokenizer(table)
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == f" {text}"


def test_prompts_begin_as_the_tokenizer_begins_texts(tokenizer: Any, table: TokenTable) -> None:
    """A template writes the first token itself, and a client's prompt may, too."""
    backend = tokenizer.backend_tokenizer
    special = SpecialTokens(backend, table.raw, 100)
    plain = backend.encode("red", add_special_tokens=False).ids
    assert special.ids("red") == [1, *plain] == tokenizer("red").input_ids
    assert special.ids("<s>red")[0] == 1
    assert special.ids("<s>red").count(1) == 1
    assert special.ids(RenderedPrompt("red")) == plain
    assert special.ids(special.unmark("red")) == plain


BLANKS = decoders.Replace("▁", " ")


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (decoders.Metaspace(), "a b"),
        (decoders.Metaspace(prepend_scheme="never"), " a b"),
        (decoders.Sequence([BLANKS, decoders.ByteFallback(), decoders.Fuse()]), " a b"),
        (decoders.Sequence([BLANKS, decoders.Fuse(), decoders.Strip(" ", 1, 0)]), "a b"),
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


SCHEMA = {
    "type": "object",
    "properties": {
        "the red square": {"type": "string", "minLength": 2, "maxLength": 9},
        "größe": {"enum": ["klein und größer", "日本 🎉"]},
    },
    "required": ["the red square", "größe"],
}


@pytest.fixture(scope="module")
def grammars(folder: Path) -> TokenGrammars:
    info = inspect(TRAINED)
    changed = {"path": str(folder), "vocab_size": WORDS, "stop_token_ids": (2,)}
    loaded = load_grammars(msgspec.structs.replace(info, chat_template="", **changed))
    assert loaded is not None
    return loaded


def streamed(grammars: TokenGrammars, table: TokenTable, grammar: str, seed: int) -> str:
    """Return an output of random tokens that the grammar allows, as streamed."""
    detokenizer = ByteDetokenizer(table)
    pieces = [detokenizer.push([token]) for token in drawn(grammars, grammar, seed)]
    return "".join(pieces) + detokenizer.flush()


CHOICE = [" the red", "Zwei Zeilen\nund", "日本 🎉"]


def test_blind_draws_keep_to_a_grammar(grammars: TokenGrammars, table: TokenTable) -> None:
    for seed in range(3):
        found = json.loads(streamed(grammars, table, constraint_from_schema(SCHEMA), seed))
        assert list(found) == ["the red square", "größe"]
        assert 2 <= len(found["the red square"]) <= 9
        assert found["größe"] in {"klein und größer", "日本 🎉"}
        assert streamed(grammars, table, encoded(choice=CHOICE), seed) in CHOICE
        pattern = "(the|red) +[a-zß]{2}[é日]"
        assert re.fullmatch(pattern, streamed(grammars, table, encoded(regex=pattern), seed))


def test_texts_of_the_tokenizer_itself_are_followed(
    grammars: TokenGrammars, own: Any, table: TokenTable
) -> None:
    """The tokens of the model's training: its own tokens of the text, after the space that begins every text."""
    matcher = grammars.matcher(encoded(choice=[" the red 日本"]))
    ids = own.encode("the red 日本")
    assert [matcher.follow([token]) for token in ids] == [None] * (len(ids) - 1) + [
        FinishReason.STOP
    ]
    assert ByteDetokenizer(table).push(ids) == " the red 日本"
