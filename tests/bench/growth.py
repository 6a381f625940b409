"""Growth of request rates with the number of clients and the length of prompts, on both sides."""

from __future__ import annotations

import argparse
import dataclasses

from rich.console import Console

from tests.bench.compare import (
    belongs,
    checkpoint_of,
    context_line,
    peer_spec,
    plan_of,
    publish,
    session_of,
    starts_here,
)
from tests.bench.options import sizes_of
from tests.bench.records import Key
from tests.bench.report import plots, tables
from tests.bench.report.ratios import Row, rows
from tests.bench.servers import sides
from tests.bench.servers.server import Server, Spec
from tests.bench.servers.session import Session
from vsched.bench.load.generator import LoadPlan, sessions_for
from vsched.bench.load.shapes import Case, Shape

CLIENT_TOKENS = 32
PROMPT_TOKENS = 16
PROBE_WORDS = (100, 400)
PURPOSES = ("clients", "prompt")


def growth(options: argparse.Namespace, console: Console) -> None:
    """Measure, and write tables and a plot."""
    checkpoint = checkpoint_of(options, console)
    session = session_of(options, console)
    ours = sides.vsched(checkpoint, sizes_of(options), options.set)
    specs = (ours, peer_spec(options, checkpoint, options.budget))
    if not options.report_only:
        _measure_missing(options, session, specs)
    _report(options, session, console)


def _measure_missing(
    options: argparse.Namespace, session: Session, specs: tuple[Spec, Spec]
) -> None:
    by_length = {length: _length_plan(options, length, 0, 0) for length in options.lengths}
    work = _keyed(session, specs, options, client_plans(options), "clients")
    work |= _keyed(session, specs, options, by_length, "prompt")
    if session.missing(work, specs):
        _measure(options, session, specs)


def client_plans(options: argparse.Namespace) -> dict[int, LoadPlan]:
    """Return a plan with short outputs for each number of clients."""
    return {
        count: _with_tokens(
            plan_of(options, "text", count, seed="0", purpose="clients"), CLIENT_TOKENS
        )
        for count in options.concurrency
    }


def _with_tokens(plan: LoadPlan, tokens: int) -> LoadPlan:
    return dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, output_tokens=tokens))


def _length_plan(options: argparse.Namespace, length: int, words: int, repeat: int) -> LoadPlan:
    shape = Shape(words=max(words, 1), output_tokens=PROMPT_TOKENS, image_pixels=16)
    return LoadPlan(
        case=Case.TEXT,
        shape=shape,
        concurrency=options.length_clients,
        sessions=sessions_for(
            Case.TEXT,
            options.length_clients,
            options.length_sessions or 2 * options.length_clients,
        ),
        seed=f"prompt/{length}/{repeat}",
    )


def _keyed(
    session: Session,
    specs: tuple[Spec, Spec],
    options: argparse.Namespace,
    plans: dict[int, LoadPlan],
    purpose: str,
) -> dict[tuple[Key, ...], LoadPlan]:
    work: dict[tuple[Key, ...], LoadPlan] = {}
    for place, plan in plans.items():
        length = place if purpose == "prompt" else 0
        for repeat in range(options.repeats):
            drawn = dataclasses.replace(plan, seed=f"{plan.seed}/{repeat}")
            keys = tuple(
                session.key(drawn, spec, purpose=purpose, repeat=repeat, length=length)
                for spec in specs
            )
            work[keys] = drawn
    return work


def _measure(options: argparse.Namespace, session: Session, specs: tuple[Spec, Spec]) -> None:
    with session.servers(specs) as servers:
        words = words_of(session, servers[0])
        longest = options.context - PROMPT_TOKENS - 1
        by_length = {
            length: _length_plan(options, length, words(min(length, longest)), 0)
            for length in options.lengths
        }
        work = _keyed(session, specs, options, client_plans(options), "clients")
        work |= _keyed(session, specs, options, by_length, "prompt")
        session.take_turns(servers, session.missing(work, specs))


class Words:
    """Converts tokens to random words by linear interpolation between two prompts."""

    def __init__(self, few: tuple[int, int], many: tuple[int, int]) -> None:
        self._each = (many[1] - few[1]) / (many[0] - few[0])
        self._template = few[1] - self._each * few[0]

    def __call__(self, tokens: int) -> int:
        # Slightly fewer, because random words vary in length and the longest prompt must fit.
        return max(int((tokens - self._template) / self._each * 0.98), 1)


def words_of(session: Session, server: Server) -> Words:
    """Measure the tokens per word on a server."""
    few, many = ((words, session.ask_prompt_tokens(server, words)) for words in PROBE_WORDS)
    return Words(few, many)


def _report(options: argparse.Namespace, session: Session, console: Console) -> None:
    names = (sides.VSCHED, options.peer)
    found = session.store.report
    tabled: dict[str, list[Row]] = {}
    for purpose in PURPOSES:
        mine = [run for run in found.runs if belongs(run, session, purpose)]
        both = [[run for run in mine if run.key.side == side] for side in names]
        tabled[purpose] = rows(both[0], both[1], ["text"])
    if not any(tabled.values()):
        return
    name = f"growth-{options.peer}-{options.checkpoint}"
    file = f"bench-{name}.png"
    title = f"{options.checkpoint}: growth with clients and with the prompt"
    plots.draw_growth(tabled["clients"], tabled["prompt"], names, title, options.out / file)
    runs = [run for one in tabled.values() for row in one for run in row.ours + row.theirs]
    started = [one for one in found.starts if starts_here(one, session, names)]
    parts = [tables.starts(sorted(started, key=lambda one: one.side != sides.VSCHED))]
    parts += [tables.rates(one, names) for one in tabled.values() if one]
    parts.append(context_line(found.machine, session.settings, runs))
    publish(options, name, parts, {file: "Growth with clients and prompts"}, console)
