"""Grammars over the tokens of one checkpoint, with llguidance.

The vocabulary is a `TokenTable`, whose bytes are the text of a client: a grammar constrains exactly that text, for
any kind of tokenizer. Compiling and following a grammar is limited by counts of work, not by time, so that the engine
and every rank get the same result. A grammar that crashes the library ends the process that checks it, and is refused.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from vsched.errors import CheckpointError, RequestRefused
from vsched.types import FinishReason, ModelInfo
from vsched.worker.drafts import allows, foresee_with, only_token
from vsched_workers.checkpoint.files import checkpoint_directory
from vsched_workers.checkpoint.schemas import SchemaError, patterns_of, rewrite_schema
from vsched_workers.checkpoint.tokenize import TokenTable
from vsched_workers.checkpoint.tokenizer_files import TOKENIZER_JSON, load_tokenizer

logger = logging.getLogger(__name__)

MESSAGE_CHARACTERS_MAX = 2000
COMPILE_S_MAX = 0.25
"""Maximum CPU time of the engine's compilation: a rank compiles accepted grammars between two steps, and others wait.
"""
RECENT_MAX = 8
"""Number of compiled grammars that are kept for further requests; one of 1,500 properties takes 3.6 MB."""
TRIED_TOKENS_MAX, TRIED_S_MAX = 32, 0.05
"""Limits of the output that a check generates: tokens, and CPU time in seconds."""
WORD_BITS = 32
FORCED_TOKENS_MIN = 16
"""Minimum number of tokens for a text without choices, if it is that long; the library drops up to 4 of them."""

Encode = Callable[[str], list[int]]
"""Tokenizes a text."""

_OPTIONS: Any = {
    "whitespace_pattern": r"[ \n]{0,1}[ ]{0,16}",
    "coerce_one_of": True,  # `rewrite_schema` has checked that the options exclude each other
}
"""Options for JSON; without a bound, a model with uncertain output may write whitespace up to `max_tokens`."""


def load_grammars(info: ModelInfo) -> TokenGrammars | None:
    """Return the grammar compiler; None if tokens are not bytes, or the model has no stop token.

    Raises:
        CheckpointError: When there is no tokenizer.
    """
    ends = [token for token in info.stop_token_ids if token < info.vocab_size]
    if not ends:
        return None
    try:
        backend = _backend(info)
        table = TokenTable.of_tokenizer(backend)
    except CheckpointError as error:
        logger.info("no grammars: %s", error)
        return None

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    # A tokenizer that adds a space before every text would produce other tokens in the middle of an output.
    known = None if table.begins_blank else encode
    return TokenGrammars(table, vocab_size=info.vocab_size, ends=ends, encode=known)


def _backend(info: ModelInfo) -> Any:
    directory: Path = checkpoint_directory(info.path)
    if (directory / TOKENIZER_JSON).is_file():
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(directory / TOKENIZER_JSON))
        except Exception as error:  # the library raises this very class
            raise CheckpointError(
                f"{TOKENIZER_JSON} cannot be loaded ({type(error).__name__}). "
                "Remedy: give the directory of a complete checkpoint."
            ) from error
    loaded = load_tokenizer(directory, vocab_size=info.vocab_size, chat_template=info.chat_template)
    return loaded.backend_tokenizer


class _Vocabulary:
    """The vocabulary in the interface of llguidance.

    If a grammar allows one text only, it allows the first token of `encode` for it, so that the model sees the tokens
    it was trained on. The library asks for the tokens of the whole remaining text at every step, and uses the first
    one.
    """

    def __init__(
        self,
        table: TokenTable,
        vocab_size: int,
        ends: Sequence[int],
        encode: Encode,
        longest: Encode,
    ) -> None:
        self.tokens = table.raw[:vocab_size]
        self.special_token_ids = [
            token
            for token, (raw, text) in enumerate(zip(self.tokens, table.text, strict=False))
            if raw and not text
        ]
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self._characters_max = FORCED_TOKENS_MIN * max(map(len, self.tokens), default=1)
        self._special = frozenset(self.special_token_ids)
        self._encode, self._longest = encode, longest

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of the beginning of a text."""
        text = text.decode() if isinstance(text, bytes) else text
        text = text[: self._characters_max]
        ids = self._encode(text)
        # In a literal, `<|im_end|>` is text: the special token would end the output, and clients would not see it.
        return ids if self._special.isdisjoint(ids) else self._longest(text)


class TokenGrammars:
    """Compiles grammars; see `vsched.worker.contract.Grammars`."""

    def __init__(
        self,
        table: TokenTable,
        *,
        vocab_size: int,
        ends: Sequence[int],
        encode: Encode | None = None,
    ) -> None:
        """Take the tokens; `ends` are the stop tokens. Without `encode`, the longest tokens are preferred."""
        vocabulary = _Vocabulary(table, vocab_size, ends, encode or self._longest, self._longest)
        self._tokenizer: LLTokenizer = LLTokenizer(
            TokenizerWrapper(vocabulary), eos_token=list(ends)
        )
        self._recent: dict[str, LLMatcher] = {}
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=500,
            initial_lexer_fuel=500_000,
            step_lexer_fuel=100_000,
            step_max_items=20_000,
            max_lexer_states=20_000,
            max_grammar_size=50_000,
            verbose_errors=False,
        )

    def _longest(self, text: str) -> list[int]:
        return self._tokenizer.greedy_tokenize(text)

    def check(self, grammar: str) -> None:
        """Compile a grammar, and generate an output that it allows; llguidance may crash the process here.

        Raises:
            RequestRefused: When it cannot be used, allows nothing, or takes too long.
        """
        started_s = time.thread_time()
        matcher = self.matcher(grammar)
        spent_s = time.thread_time() - started_s
        if matcher.error:
            raise _refused(matcher.error)
        if spent_s > COMPILE_S_MAX:
            raise _refused(f"compiling it took {spent_s:.2f} s, the limit is {COMPILE_S_MAX} s")
        _try_out(matcher, random.Random(grammar))  # noqa: S311

    def matcher(self, grammar: str) -> OutputMatcher:
        """Return the matcher of one output for a grammar that was checked."""
        return OutputMatcher(self._compiled(grammar), self._tokenizer.vocab_size)

    def _compiled(self, grammar: str) -> LLMatcher:
        """Compile a grammar, or copy the unused matcher of an equal one: 51 ms or 0.2 ms for 1,500 properties."""
        matcher = self._recent.pop(grammar, None)
        if matcher is None:
            written = _in_its_form(grammar)
            matcher = LLMatcher(self._tokenizer, written, log_level=0, limits=self._limits)
        self._recent[grammar] = matcher
        if len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]
        return matcher.deep_copy()


def _try_out(matcher: OutputMatcher, rng: random.Random) -> None:
    """Generate one output with a grammar: most rules are compiled on first use, otherwise first in a rank."""
    started_s = time.thread_time()
    for _ in range(TRIED_TOKENS_MAX):
        allowed = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))
        ended = matcher.follow([int(rng.choice(allowed))])
        if ended is not None or time.thread_time() - started_s > TRIED_S_MAX:
            return


class OutputMatcher:
    """Follows one output; see `vsched.worker.contract.TokenMatcher`.

    Attributes:
        error: The reason why the grammar cannot be followed; empty otherwise.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, *, eager: bool = False) -> None:
        """Take llguidance's matcher; an eager one computes each mask, and finds errors, immediately."""
        self._eager = eager
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask = np.zeros(-(-vocab_size // WORD_BITS), np.uint32)
        self.error = ""
        self._looked = False
        self._look()

    @property
    def mask(self) -> npt.NDArray[np.uint32]:
        """The tokens that may come next."""
        if not self._looked:
            self._look()
        return self._mask

    def follow(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Take the next tokens; return a finish reason if the output is complete, or cannot be followed any more."""
        matcher = self._matcher
        if not self.error and not matcher.consume_tokens(list(token_ids)):
            self._fail(matcher.get_error())
        if not self.error:
            if matcher.is_stopped():
                return FinishReason.STOP
            self._looked = False
            if self._eager:
                self._look()
        return FinishReason.ERROR if self.error else None

    def foresee(
        self, wanted: Sequence[int], count: int
    ) -> list[tuple[int, npt.NDArray[np.uint32]]]:
        """Return up to `count` next tokens, and the mask after each; errors affect only a copy of the matcher."""
        mask = self.mask
        begins = bool(wanted) and allows(mask, wanted[0])
        if self.error or not (begins or only_token(mask) is not None):
            return []
        copy = OutputMatcher(self._matcher.deep_copy(), self._vocab_size, eager=True)
        return [] if copy.error else foresee_with(copy, wanted, count)

    def _look(self) -> None:
        """Compute the mask of the next token."""
        self._looked = True
        matcher = self._matcher
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if matcher.is_error():
            self._fail(matcher.get_error())
        elif not self._mask.any():
            self._fail("it allows no text")

    def _fail(self, error: str) -> None:
        self.error = error or "unknown"
        self._mask.fill(0xFFFFFFFF)  # a token must be drawn in the step that ends the request


class _Tree:
    """Converts a tree of literals, schemas and texts (see `vsched.api.tools.choice`) to Lark for llguidance."""

    def __init__(self) -> None:
        self._terminals: dict[str, str] = {}
        self._repetitions: list[str] = []

    def in_lark(self, start: Any, rules: dict[str, Any]) -> str:
        """Return the grammar of a tree."""
        lines = [f"start: {self._written(start)}"]
        lines += [f"{name}: {self._written(node)}" for name, node in rules.items()]
        lines += [f"repeated_{index}: {part}" for index, part in enumerate(self._repetitions)]
        lines += [f"{name}: {text}" for text, name in self._terminals.items()]
        return "\n".join(lines)

    def _written(self, node: Any) -> str:
        if isinstance(node, str):
            return json.dumps(node, ensure_ascii=False)
        match node:
            case {"all": parts}:
                return f"({' '.join(map(self._written, parts))})" if parts else '""'
            case {"any": parts}:
                return f"({' | '.join(map(self._written, parts))})"
            case {"many": part}:
                return self._repeated(self._written(part), node["between"])
            case {"rule": name}:
                return str(name)
            case {"schema": schema}:
                return f"%json {_written_schema(schema)}"
            case {"text": text}:
                return self._text(**text)
        raise TypeError("a part of a grammar is none")

    def _repeated(self, part: str, between: str) -> str:
        name = f"repeated_{len(self._repetitions)}"
        self._repetitions.append(part)
        return f"({name} ({self._written(between)} {name})*)"

    def _text(
        self,
        end: str,
        without: str,
        least: int = 0,
        most: int | None = None,
        pattern: str | None = None,
    ) -> str:
        """Return the terminal of a text including its end marker: a separate text would consume the marker as well."""
        body = [rf"/(.|\n){{{least:d},{'' if most is None else format(most, 'd')}}}/"]
        if not least and most is None:
            body = [r"/(.|\n)*/"]
        if pattern is not None:
            body += [f"/{_whole(each)}/" for each in patterns_of(pattern)]
        body.append(rf"~/(.|\n)*{_quoted(without)}(.|\n)*/")
        text = self._terminal(" & ".join(body))
        return self._terminal(f"{text} {json.dumps(end, ensure_ascii=False)}")

    def _terminal(self, text: str) -> str:
        return self._terminals.setdefault(text, f"TEXT_{len(self._terminals)}")


def _written_schema(schema: Any) -> str:
    """Return the JSON of a schema in the form that the library enforces, with its options."""
    made = rewrite_schema(schema)
    # A schema of `true` allows anything, `false` nothing: the wrapper can hold the options.
    held = made if isinstance(made, dict) else {"allOf": [made]}
    return json.dumps({**held, "x-guidance": _OPTIONS}, ensure_ascii=False)


def _quoted(literal: str) -> str:
    """Return a regular expression that matches a literal."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in literal)


def _whole(pattern: str) -> str:
    """Return a regular expression of texts that contain a match of a schema's pattern, without slashes."""
    inner = pattern.removeprefix("^")
    begin = "" if inner != pattern else r"(.|\n)*"
    ends = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner.removesuffix("$") if ends else inner
    inner = inner.replace("\\/", "/").replace("/", r"\x2f").replace("\n", r"\n")
    return f"{begin}({inner}){'' if ends else '(.|' + chr(92) + 'n)*'}"


def _in_its_form(grammar: str) -> str:
    """Return a grammar in llguidance's format.

    Raises:
        RequestRefused: When it is invalid.
    """
    try:
        ((kind, value),) = msgspec.json.decode(grammar, type=dict[str, Any]).items()
        match kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(_written_schema(value))
            case "regex":
                return LLMatcher.grammar_from_regex(value)
            case "choice":
                options = [json.dumps(option, ensure_ascii=False) for option in value]
                return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(options))
            case "grammar":
                if "%json" in value:
                    raise SchemaError("%json is not supported in a grammar. Remedy: send a schema")
                # The library mistakes Lark with attributes or modifiers of rules for GBNF.
                lark = any_to_lark(value) if "::=" in value else value
                return LLMatcher.grammar_from_lark(lark)
            case "thought":
                answer = msgspec.json.encode(value["answer"]).decode()
                return _behind_thought(value["end"], _in_its_form(answer))
            case "calls":
                return LLMatcher.grammar_from_lark(_Tree().in_lark(**value))
    except RequestRefused:
        raise
    except SchemaError as error:
        raise _unusable(str(error)) from None
    except Exception as error:  # the converter raises plain exceptions, and msgspec its own
        raise _refused(str(error)) from error
    raise _refused(f"{kind} is not a type of grammar")


def _behind_thought(end: str, answer: str) -> str:
    """Return the grammar of any text up to `end`, followed by an output of the given grammar."""
    # Lark grammars are plain text, all others JSON.
    grammars = (
        json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    )
    grammars[0]["name"] = "answer"
    lark = (
        "start: thought gap? @answer\n"
        f"thought[lazy]: TEXT {json.dumps(end)}\n"
        "TEXT: /(.|\\n)*/\n"
        'gap: "\\n\\n"\n'
    )
    return json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]})


def _refused(reason: str) -> RequestRefused:
    """Return the error for a grammar, from the error text of the grammar library, which may have many lines."""
    lines = [line for line in reason.splitlines() if line.strip(" ^|-0123456789")]
    text = " ".join(" ".join(lines).split())
    text = "".join(each if each.isprintable() else "\ufffd" for each in text)
    text = text[:MESSAGE_CHARACTERS_MAX].rstrip(". ")
    if text.startswith("panic"):  # a bug of the library, whose text has internal details
        text = "it cannot be compiled"
    if text.startswith("NoExtension"):
        text = "it allows no text"
    return _unusable(f"{text}. Remedy: correct or simplify it")


def _unusable(reason: str) -> RequestRefused:
    return RequestRefused(
        f"the schema or grammar cannot be used: {reason.rstrip('.')}.", code="invalid_grammar"
    )
