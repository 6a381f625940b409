"""Hostile grammars: Lark with llguidance's own syntax, and GBNF."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.patterns import count, draw_pattern
from tests.fuzz.schemas import draw_schema

SPECIAL = (
    "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|image_pad|>", "<|vision_start|>", "<[0]>",
    "<[1-200]>", "<[^3]>", "<[*]>", "<[99999999]>", "<[5-2]>", "<|nowhere|>", "<>",
    "<[4294967296]>", "<[-1]>", "<[1,2,3-4]>", "<[^0-300]>",
)  # fmt: skip
STATEMENTS = (
    "%ignore /[ \\t]+/", "%ignore /(.|\\n)*/", "%ignore \"\"", "%ignore WS", "%import common.INT",
    "%import common.WS", "%import nowhere.X", "%import common (INT, WS)", "%declare D",
    "%override start: \"x\"", "%extend start: \"x\"", "%llguidance {}",
    '%llguidance {"no_forcing": true}', '%llguidance {"allow_invalid_utf8": true}',
    '%llguidance {"allow_initial_skip": true}', '%llguidance {"skip_repetition": "once"}',
    '%llguidance {"no_forcing": 3}', "%llguidance [", "%json {}", "%regex {}", "start: start",
    "X: X", "X: Y\nY: X", "start.1: \"a\"", "?start: \"a\"", "!start: \"a\"", "_x: \"a\"",
    "start: \"twice\"", "// c", "# c",
)  # fmt: skip
ATTRIBUTES = (
    "lazy", "capture", 'capture="c"', "max_tokens=1", "max_tokens=0", "max_tokens=99999999999",
    "temperature=0.5", "temperature=-1", "temperature=1e99", 'suffix="x"', 'suffix=""',
    'suffix=/[a-z]+/', 'stop="x"', 'stop=""', "stop=/b+/", 'stop_capture="s"', "nope", "priority=3",
)  # fmt: skip
_STRINGS = (
    '"a"',
    '"b"',
    '"ab"',
    '""',
    '"é"',
    '"\\n"',
    '"\\u00e9"',
    '"\\x00"',
    '"a"i',
    '"日本"',
    '"' + "z" * 500 + '"',
)
_PARAMETRIC = (
    'start: p::0\np::_ : "" %if eq([0:8], 200) | "a" p::incr([0:8])\n',
    'start: p::0x0\np::_ : "" %if is_ones([0:6]) | "a" p::set_bit(0) %if bit_clear(0) | "b" p::set_bit(5)\n',
    'start: p::0xffffffffffffffff\np::_ : p::_ | "a" p::decr([0:64]) %if gt([0:64], 0)\n',
    'start: p::0\np::_ : "" %if bit_count_ge([0:64], 64) | "a" p::set_bit(63) | "b" p::set_bit(64)\n',
    'start: p::0\np::_ : "a" p::incr([0:64]) q::_\nq::_ : "" | "b" p::incr([0:4])\n',
)  # fmt: skip


def draw_lark(rng: random.Random) -> str:
    """Draw a grammar in Lark: random rules, or one excessive construct."""
    made = rng.choice(_SHAPES)(rng) if rng.random() < 0.5 else _rules(rng)
    if rng.random() < 0.25:
        made += "\n" + "\n".join(rng.choice(STATEMENTS) for _ in range(rng.randrange(1, 4)))
    return made if rng.random() < 0.9 else _damaged(made, rng)


def draw_gbnf(rng: random.Random) -> str:
    """Draw a grammar in llama.cpp's form."""
    if rng.random() < 0.4:  # the same shapes, in the other language
        made = rng.choice(_SHAPES)(rng).replace("start", "root").replace(": ", " ::= ")
        return made if rng.random() < 0.9 else _damaged(made, rng)
    names = ["root", *(f"r{at}" for at in range(rng.choice((1, 3, 8))))]
    atoms = (
        '"a"',
        '"\\n"',
        "[a-z]",
        "[^\\n]",
        "[\\x00-\\xff]",
        '"\\u0041"',
        "[a-",
        '"',
        "[]",
        "[^]]",
        "[日-本]",
        '"\\U0001f642"',
        ".",
    )

    def part(depth: int) -> str:
        match rng.randrange(6 if depth else 2):
            case 0:
                return rng.choice(atoms[:4]) if rng.random() < 0.8 else rng.choice(atoms)
            case 1:
                return rng.choice(names)
            case 2:
                return f"({part(depth - 1)} | {part(depth - 1)})"
            case 3:
                return f"{part(depth - 1)}{rng.choice('*+?')}"
            case 4:
                return f"{part(depth - 1)}{{{count(rng)},{rng.choice(('', str(count(rng))))}}}"
        return f"{part(depth - 1)} {part(depth - 1)}"

    made = "\n".join(f"{name} ::= {part(3)}" for name in names)
    return made if rng.random() < 0.8 else _damaged(made, rng)


def _rules(rng: random.Random) -> str:
    """Return some rules and terminals that use each other, at times in a circle."""
    rules = ["start", *(f"r{at}" for at in range(rng.choice((0, 1, 3, 8, 20))))]
    terminals = [f"T{at}" for at in range(rng.choice((0, 1, 2, 5)))]
    lines = []
    for name in rules:
        held = (
            f"[{', '.join(rng.choice(ATTRIBUTES) for _ in range(rng.randrange(1, 3)))}]"
            if rng.random() < 0.12
            else ""
        )
        plain = held and rng.random() < 0.8
        body = _terminal(rng, terminals, 1) if plain else _body(rng, rules, terminals, 3)
        lines.append(f"{name}{held}: {body}")
    for at, name in enumerate(terminals):
        others = terminals if rng.random() < 0.1 else terminals[at + 1 :]
        lines.append(f"{name}: {_terminal(rng, others, 2)}")
    return "\n".join(lines) + "\n"


def _body(rng: random.Random, rules: list[str], terminals: list[str], depth: int) -> str:
    draw = rng.randrange(10 if depth else 4)
    match draw:
        case 0 | 1:
            return rng.choice(_STRINGS)
        case 2:
            return rng.choice(rules)
        case 3:
            return rng.choice(terminals) if terminals else f"/{_slashed(rng)}/"
        case 4 | 5:
            return f"{_body(rng, rules, terminals, depth - 1)} {_body(rng, rules, terminals, depth - 1)}"
        case 6:
            return f"({_body(rng, rules, terminals, depth - 1)} | {_body(rng, rules, terminals, depth - 1)})"
        case 7:
            times = rng.choice(
                (
                    "*",
                    "+",
                    "?",
                    f"{{{count(rng)}}}",
                    f"{{{count(rng)},}}",
                    f"{{0,{count(rng)}}}",
                    f"~{count(rng)}..{count(rng)}",
                )
            )
            return f"({_body(rng, rules, terminals, depth - 1)}){times}"
        case 8:
            return rng.choice(
                (
                    rng.choice(SPECIAL),
                    '"a".."z"',
                    f"[{rng.choice(rules)}]",
                    "@a",
                    f"{rng.choice(rules)}::3",
                )
            )
    if rng.random() < 0.5:
        return f"%json {json.dumps(draw_schema(rng))}"
    if rng.random() < 0.2:
        return f"%lark {{\n{draw_lark(rng)}}}"
    return f"/{_slashed(rng)}/" if rng.random() < 0.5 else _structured(rng)


def _terminal(rng: random.Random, names: list[str], depth: int) -> str:
    match rng.randrange(7 if depth else 3):
        case 0:
            return f"/{_slashed(rng)}/{rng.choice(('', '', 'i', 's', 'imsux'))}"
        case 1:
            return rng.choice(_STRINGS)
        case 2:
            return rng.choice(names) if names else '"t"'
        case 3:
            return f"({_terminal(rng, names, depth - 1)} & {_terminal(rng, names, depth - 1)})"
        case 4:
            return f"~{_terminal(rng, names, depth - 1)}"
        case 5:
            return f"({_terminal(rng, names, depth - 1)}){rng.choice(('*', '+', f'{{0,{count(rng)}}}'))}"
    return _structured(rng)


def _structured(rng: random.Random) -> str:
    """Return a regular expression in llguidance's JSON form."""
    words = " ".join(
        rng.choice(("foo", "bar", "é", "", "a.")) for _ in range(rng.choice((0, 3, 100, 3000)))
    )
    options: tuple[dict[str, Any], ...] = (
        {"substring_words": words},
        {"substring_chars": words},
        {"substring_chunks": words.split(" ")},
        {"substring_words": 3},
        {},
    )
    return f"%regex {json.dumps(rng.choice(options[: rng.choice((3, 3, 3, 5))]))}"


def _slashed(rng: random.Random) -> str:
    return draw_pattern(rng).replace("/", "\\/").replace("\n", "\\n") or "a"


def _chain(rng: random.Random) -> str:
    """Return rules, or terminals, that each refer to the next."""
    links, name = rng.choice((10, 100, 1000, 2500, 5000)), rng.choice("rR")
    around = rng.choice(
        (
            "{}",
            "{} {}",
            "({})*",
            '"a" {}',
            '{} "a"',
            "({} | {})",
            "({}){{2}}",
            "{}?",
            "~{}",
            "({} & {})",
        )
    )
    links = links if around.count("{}") == 1 else min(links, 1500)
    lines = [f"{name}{at}: {around.format(*[f'{name}{at + 1}'] * 2)}" for at in range(links)]
    last = rng.choice(
        ('"a"', f"{name}0", f"/{_slashed(rng)}/", "%json {}" if name == "r" else "/a/")
    )
    return "\n".join([f"start: {name}0", *lines, f"{name}{links}: {last}\n"])


def _recursive(rng: random.Random) -> str:
    """Return rules that begin, end or consist of themselves, ambiguous and empty ones too."""
    size = rng.choice((1, 2, 5, 30, 200))
    bodies = (
        '{} "a" | "b"',
        '"a" {} | "b"',
        "{} {} | ",
        '{} {} {} | "a" | ',
        '"(" {} ")" | ',
        "{}",
        '({})* | "a"',
        '{} | {} | "x"',
    )
    lines = []
    for at in range(size):
        body = rng.choice(bodies)
        lines.append(
            f"r{at}: "
            + body.format(
                *(f"r{rng.choice((at, (at + 1) % size, rng.randrange(size)))}" for _ in range(3))
            )
        )
    return "\n".join(["start: r0", *lines]) + "\n"


def _brackets(rng: random.Random) -> str:
    depth = rng.choice((10, 60, 64, 65, 1000, 15_000))
    opened, closed = rng.choice(("()", "[]", ("(", ")*"), ("(", "){2}"), ("~(", ")")))
    return f'start: {"x " if rng.random() < 0.2 else ""}{opened * depth}"a"{closed * depth}\n'


def _many(rng: random.Random) -> str:
    """Return very many alternatives, parts, terminals or repetitions."""
    size = rng.choice((10, 300, 2500))
    match rng.randrange(6):
        case 0:
            return "start: " + " | ".join(f'"{at}x"' for at in range(size)) + "\n"
        case 1:
            return (
                "start: "
                + " ".join(f"r{at}" for at in range(size))
                + "\n"
                + "".join(f'r{at}: "a"?\n' for at in range(size))
            )
        case 2:
            return (
                "start: "
                + " | ".join(f"T{at}" for at in range(size))
                + "\n"
                + "".join(f"T{at}: /[a-z]+{at}/\n" for at in range(size))
            )
        case 3:
            bounds = "".join(f"{{{rng.choice((count(rng), 10))}}}" for _ in range(1))
            inner = '"a"'
            for _ in range(rng.randrange(1, 6)):
                inner = f"({inner} {rng.choice(('', 'B', 'r'))}){bounds}"
            return f'start: {inner}\nr: "c"?\nB: "b"*\n'
        case 4:
            return (
                "start: T\nT: "
                + rng.choice((" & ", " | ")).join(
                    f"/(.|\\n)*{at}(.|\\n)*/" for at in range(min(size, 200))
                )
                + "\n"
            )
    return "start: " + " ".join('("a" | "b" | )' for _ in range(size)) + "\n"


def _schemas(rng: random.Random) -> str:
    """Return schemas within rules."""
    inner = [
        f"%json {json.dumps(draw_schema(rng))}"
        if rng.random() < 0.9
        else f"%lark {{\n{draw_lark(rng)}}}"
        for _ in range(rng.randrange(1, 4))
    ]
    body = rng.choice((" ", " | ", ' "," ')).join(inner)
    return rng.choice(
        (
            "start: {}\n",
            'start: "a" b\nb: {}\n',
            "start: b+\nb: {}\n",
            'start: t b\nt[lazy]: /(.|\\n)*/ "x"\nb: {}\n',
        )
    ).format(body)


def _parametric(rng: random.Random) -> str:
    return rng.choice(_PARAMETRIC)


def _damaged(text: str, rng: random.Random) -> str:
    """Change a few characters."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(text) + 1)
        text = (
            text[:at]
            + rng.choice(
                (
                    "",
                    "(",
                    ")",
                    '"',
                    "/",
                    "\n",
                    ":",
                    "|",
                    "{",
                    "}",
                    "é",
                    "\x00",
                    "~",
                    "%json",
                    "<",
                    "\\",
                )
            )
            + text[at + rng.randrange(3) :]
        )
    return text


_SHAPES: tuple[Callable[[random.Random], str], ...]
_SHAPES = (_chain, _recursive, _recursive, _brackets, _many, _schemas, _schemas, _parametric)
