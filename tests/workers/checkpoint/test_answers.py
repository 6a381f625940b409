"""Output parsed with a checkpoint's own `response_template`, streamed or not; malformed output is not lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from vsched.types import ModelInfo
from vsched.worker.contract import AnswerPart
from vsched_workers.checkpoint.detokenize import TokenTable
from vsched_workers.checkpoint.preprocess.text import TemplateParser
from vsched_workers.plugin import TRAINED, plugin

TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<mull>", "close": "</mull>"},
        "content": {"close": "<end>"},
        "tool_calls": {
            "open": "<do>",
            "close": "</do>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def read(pieces: Any, prompt: str = "<assistant>") -> dict[str, str]:
    parser = TemplateParser(TEMPLATE, prompt, TOOLS)
    parts: list[AnswerPart] = [part for piece in pieces for part in parser.push(piece)]
    reported: dict[str, str] = {}
    for part in [*parts, *parser.finish()]:
        key = f"call {part.name}" if part.kind == "call" else part.kind
        reported[key] = reported.get(key, "") + part.text
    return reported


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("Hello.", {"content": "Hello."}),
        ("<mull>A < b.</mull>Yes.", {"reasoning": "A < b.", "content": "Yes."}),
        ('<do>{"name": "f", "arguments": {"a": "é"}}</do>', {"call f": '{"a": "é"}'}),
        (
            'I do.<do>{"name": "f", "arguments": {}}</do><do>{"name": "g", "arguments": {}}</do>',
            {"content": "I do.", "call f": "{}", "call g": "{}"},
        ),
        ("<do>no JSON</do> more", {"content": "<do>no JSON</do> more"}),
        ('<do>{"a": 1}</do>', {"content": '<do>{"a": 1}</do>'}),
    ],
)
def test_answers_are_read_as_their_checkpoint_says(answer: str, wanted: dict[str, str]) -> None:
    for pieces in ([answer], list(answer)):
        assert read(pieces) == wanted


def test_constructs_begun_in_the_prompt_are_continued() -> None:
    assert read(["A.</mull>Yes."], "<user>Hi<assistant><mull>") == {
        "reasoning": "A.",
        "content": "Yes.",
    }


def test_texts_show_the_special_tokens_that_a_template_names() -> None:
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    tokens = ["<mull>", "</mull>", "<pad>"]
    backend.add_tokens([AddedToken(each, special=True) for each in tokens])
    table = TokenTable.of_tokenizer(backend, shown=json.dumps(TEMPLATE))
    assert table.decode([backend.get_vocab()[each] for each in tokens]) == "<mull></mull>"


def test_a_checkpoint_without_a_template_reads_no_answers() -> None:
    info: ModelInfo = plugin.inspect(str(TRAINED), dtype="auto", item_tokens_max=0)
    front = plugin.load_preprocessor(info)
    assert not front.parses_answers
