"""Tokenizers and chat templates without transformers give the same as with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tests.workers.driver import Checkpoints
from tests.workers.edited import copy_of, write
from vsched_workers.checkpoint.chat_templates import render_template, variables_of
from vsched_workers.checkpoint.plain_tokenizer import _QWEN_STEPS, load_plain

TEXT = "<|im_start|>It's 12 é€😀\n\n<|vision_start|><|image_pad|> two<|im_end|>"
FLAGS = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
ADDED = {"content": "<|im_end|>", **FLAGS}


@pytest.fixture
def folder(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    return copy_of(checkpoints("nano25"), tmp_path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_5_vl", {}),
        ("llama", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>"}),
        ("qwen3", {"add_bos_token": False, "bos_token": None, "unk_token": "<|endoftext|>"}),
        ("llama", {"added_tokens_decoder": {}, "pad_token": {**ADDED, "__type": "AddedToken"}}),
        ("qwen2_5_vl", {"tokenizer_class": "Qwen2TokenizerFast", "errors": "replace"}),
        ("qwen3", {"tokenizer_class": "Qwen2Tokenizer", "pad_token": None}),
        ("llama", {"tokenizer_class": "Qwen2Tokenizer", "pad_token": None}),
    ],
)
def test_plain_tokenizer_equals_transformers(
    folder: Path, family: str, changes: dict[str, Any]
) -> None:
    """The same ids and named tokens, with and without the tokens that begin a text."""
    write(folder / "config.json", {"model_type": family})
    write(folder / "tokenizer_config.json", changes)
    qwen = changes.get("tokenizer_class", "").startswith("Qwen")
    if qwen:
        write(folder / "tokenizer.json", _QWEN_STEPS)
    plain = load_plain(folder)
    if qwen and family == "llama":
        assert plain is None
        return
    assert plain is not None
    wanted = AutoTokenizer.from_pretrained(folder)
    assert plain.special_tokens_map == wanted.special_tokens_map
    for adds in (True, False):
        found = plain.backend_tokenizer.encode(TEXT, add_special_tokens=adds).ids
        assert found == wanted.encode(TEXT, add_special_tokens=adds)
    added = wanted.backend_tokenizer.get_added_tokens_decoder()
    assert plain.backend_tokenizer.get_added_tokens_decoder().keys() == added.keys()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"model_type": "phi3"}),
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": None}),
        ("tokenizer_config.json", {"eos_token": "<|new|>"}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<|new|>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<|image_pad|>"}}),
        ("tokenizer_config.json", {"image_token": "<|image_pad|>"}),
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"response_template": {}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {**ADDED, "special": False}}}),
        ("special_tokens_map.json", {}),
    ],
)
def test_transformers_loads_tokenizers_that_it_changes(
    folder: Path, file: str, changes: dict[str, Any]
) -> None:
    """Another class, tokens that the file lacks, and settings with an effect on ids."""
    write(folder / file, changes)
    assert load_plain(folder) is None


def test_vocabulary_with_options_of_its_own_is_for_transformers(folder: Path) -> None:
    """Qwen's class in transformers builds a vocabulary without options."""
    write(folder / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    write(folder / "tokenizer.json", _QWEN_STEPS)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.model.fuse_unk = True
    backend.save(str(folder / "tokenizer.json"))
    assert load_plain(folder) is None


LOOP = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}\n{% endfor %}"
)
TEMPLATES = {
    "loop": LOOP + "{{ bos_token }}{% if add_generation_prompt %}assistant:{% endif %}",
    "untrimmed": "{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}/{{ m.reasoning_content }};{% endfor %}",
    "tools": "{{ tools | tojson(indent=2) }} {{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}",
    "globals": (
        "{% set n = namespace(x=1) %}{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}"
        "{% set n.x = n.x + i %}{% endfor %}{{ n.x }}{{ dict(a=1) }}{{ dict.fromkeys('ab', 2) }}"
        "{{ strftime_now('%%') }}\n  {% generation %}\n{{ messages[0].role }}\n{% endgeneration %}!"
    ),
    "missing": "{{ messages[0].tool_calls is defined }} {{ documents }} {{ what }}",
    "raising": "{{ raise_exception('no') }}",
    "sandbox": "{{ ''.__class__.__mro__ }}",
    "private": "{% set n = namespace(__class__=1) %}",
    "changing": "{% set _ = messages.append(1) %}",
    "wrong": "{{ messages[0].content + 1 }}",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Hello \n", "tool_calls": None}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b ", "thinking": "c"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y "}]}],
    [{"role": "user", "content": "", "reasoning_content": None, "reasoning": "r"}],
    [],
]


def outcome(render: Callable[..., str], *positional: Any, **arguments: Any) -> str:
    """Return the rendered text, or the kind of error."""
    try:
        return render(*positional, **arguments)
    except jinja2.TemplateError:
        return "TemplateError"
    except (TypeError, ValueError, KeyError, AttributeError):
        return "error"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_rendering_equals_transformers(template: str) -> None:
    """Output or kind of error, also of a last message that is continued."""

    def wanted(text: str, chat: list[Any], **arguments: Any) -> str:
        if not chat:
            raise ValueError  # raised by the tokenizer in transformers
        stated = [{key: value for key, value in m.items() if value is not None} for m in chat]
        found: Any = render_jinja_template([stated], chat_template=text, **arguments)
        return str(found[0][0])

    for chat in CHATS:
        for arguments in (
            {"bos_token": "<s>"},
            {"add_generation_prompt": True, "tools": [{"name": "é<"}]},
            {"continue_final_message": True},
        ):
            assert outcome(render_template, template, chat, **arguments) == outcome(
                wanted, template, chat, **arguments
            )


def test_requests_set_variables_that_a_template_reads() -> None:
    """Free variables, without arguments of rendering, globals, and names and macros of the template."""
    read = "{{ messages }}{{ tools }}{{ bos_token }}{% if thinking is defined %}{{ effort }}{% endif %}"
    own = "{% macro f(a) %}{{ a }}{{ strftime_now('%Y') }}{% endmacro %}{% set b = 1 %}{{ f(b) }}"
    assert variables_of(read + own) == {"bos_token", "thinking", "effort"}
    assert variables_of(LOOP) == set()
