"""Hostile regular expressions: every kind of syntax, large counts, and catastrophic backtracking."""

from __future__ import annotations

import random

COUNTS = (
    0,
    1,
    2,
    3,
    7,
    50,
    255,
    256,
    1000,
    5000,
    65_535,
    10**6,
    2**31 - 1,
    2**31,
    2**32,
    2**63,
    2**64,
)
_ATOMS = (
    "a", "b", "ab", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[a-z]", "[^a-z]", "[^]", "[]",
    "[a-", "[z-a]", r"\p{L}", r"\P{L}", r"\p{Greek}", r"\p{Nope}", r"\pN", r"\x41", r"\x{10ffff}",
    r"\x{110000}", r"\u00e9", r"\u{1f642}", r"\ud800", "é", "日本", "\U0001f642", "\x00", r"\0",
    r"\b", r"\B", "^", "$", r"\A", r"\z", r"\Z", r"\/", "/", '"', "'", r"\n", "\n", r"\1", r"\k<n>",
    "(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?>a+)", "(?i)", "(?s:.)", "(?x: a b )", "(?-u)",
    "(?P<n>a)", "(?<n>b)", "(?:)", "()", "", r"\Q", "(?#no)", "(*FAIL)", "[[:alpha:]]", "[a&&b]",
    "[a-z--m]", r"[\d-x]", "{", "}", "(", ")", "[", "]", "|", "*", "+", "?", "\\", "{,3}", "{3",
    "a{2,1}", r"\c", r"\N{DIGIT ONE}", r"\R", r"\X",
)  # fmt: skip
_WHOLE = (
    "(a+)+$", "(a|a)*$", "(a|aa)+$", "(.*a){20}", "^(([a-z])+.)+[A-Z]([a-z])+$", r"(\w+\s?)*$",
    "(x+x+)+y", "(.*)*", "((a*)*)*", "(a?){50}a{50}", "(a?){1000}a{1000}",
    "((.{1,500}b?){1,500}c?){1,500}", ".*.*.*.*.*.*.*.*x", "[ab]*a[ab]{20}", "(a|b)*a(a|b){14}",
    "(?:a{0,100}){0,100}", "((a{0,30}){0,30}){0,30}", r"(\p{L}{0,50}){0,50}",
    r"^[^\s@]+@[^\s@]+\.[^\s@]+$", r"^(?!$)(?=.*[A-Z])(?=.*\d).{8,}$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^(\d{3}-){1000}$", "(([a-z]{1,9},){1,99};){1,99}",
    "^" * 2000 + "a", "a*" * 2000, "(a|b)?" * 500, "[^\U0001f642]{0,4000}", ".{0,60000}",
)  # fmt: skip


def count(rng: random.Random) -> int:
    """Draw a count: mostly small, at times at the edge of a type of integer."""
    return rng.choice(COUNTS) if rng.random() < 0.3 else rng.randrange(30)


def draw_pattern(rng: random.Random) -> str:
    """Draw a regular expression: one of the known, one by the syntax, one of many parts, or one nested deeply."""
    match rng.randrange(8):
        case 0:
            return rng.choice(_WHOLE)
        case 1:
            parts = [_pattern(rng, 1) for _ in range(rng.choice((5, 50, 400)))]
            return rng.choice(("", "|", ".*"))[:2].join(parts)[:60_000]
        case 2:
            depth = rng.choice((10, 60, 64, 65, 500, 20_000))
            inner = rng.choice(("a", "a|b", "[a-z]", ".*"))
            return "(" * depth + inner + rng.choice((")", ")*", "){2}", ")?"))[:4] * depth
        case 3:
            return f"^{_pattern(rng, 3)}$"
        case _:
            return _pattern(rng, rng.randrange(1, 5))


def _pattern(rng: random.Random, depth: int) -> str:
    if not depth or rng.random() < 0.15:
        # Mostly valid atoms, so that most of a larger pattern is valid.
        return rng.choice(_ATOMS) if rng.random() < 0.25 else rng.choice(_ATOMS[:11])
    match rng.randrange(5):
        case 0:
            return _pattern(rng, depth - 1) + _pattern(rng, depth - 1)
        case 1:
            return f"({_pattern(rng, depth - 1)}|{_pattern(rng, depth - 1)})"
        case 2:
            return (
                f"({_pattern(rng, depth - 1)}){rng.choice(('*', '+', '?', '*?', '+?', '??', '*+'))}"
            )
        case 3:
            return f"({_pattern(rng, depth - 1)}){{{_bounds(rng)}}}"
    return _pattern(rng, depth - 1)


def _bounds(rng: random.Random) -> str:
    low, high = sorted((count(rng), count(rng)))
    return rng.choice((f"{low}", f"{low},", f"{low},{high}", f"0,{high}", f"{high},{low}"))
