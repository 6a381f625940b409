"""A server with simulated ranks serves every request over HTTP, whatever its policies do."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.contract.harmful import KINDS, ODD, RAISES, changed_by, wrapped
from vsched.config import Config
from vsched.config.policies import policy_table
from vsched.plugins import load_policy_class
from vsched.policy import POLICY_TABLES
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.cluster.scenario import draw_arrivals
from vsched.sim.loop import VirtualLoop

BODY = {"prompt": "1 2 3", "max_tokens": 4, "ignore_eos": True}
DOES: list[Callable[[Any, Any], Any]] = []
"""What all policies of this file do, with the built-in one and the view."""


def _harm(ask: Any, view: Any) -> Any:
    return DOES[-1](ask, view)


TABLES = {table: kind for table, kind in POLICY_TABLES.items() if kind in KINDS}
for _table, _kind in TABLES.items():
    _name = policy_table(small_config(), _table)["use"]
    _made = wrapped(load_policy_class(_kind, _name), _harm)
    globals()[f"Harmful_{_table.replace('.', '_')}"] = type(_made)


def harmful_config() -> Config:
    """Return a small configuration in which every policy with a view is one of this file."""
    config = small_config()
    for table in TABLES:
        use = {"use": f"{__name__}:Harmful_{table.replace('.', '_')}"}
        section, _, key = table.partition(".")
        if key:
            changed = msgspec.structs.replace(getattr(config, section), **{key: use})
            config = msgspec.structs.replace(config, **{section: changed})
        else:
            config = msgspec.structs.replace(config, **{section: use})
    return config


async def _serve() -> dict[str, Any]:
    config = harmful_config()
    async with SimEngine(config, allow_policy_failures=True) as engine:
        await engine.run(draw_arrivals(random.Random(5), 12))
        await engine.heal()
        answer = await engine.client.request("POST", "/v1/completions", json=BODY)
        assert answer.status == 200, answer.body
        return engine.engine.statistics()


def serve(does: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Serve a few requests, some with images, and one more at the end; return the statistics."""
    DOES.append(does)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(_serve())
    finally:
        DOES.pop()


def test_no_view_can_be_changed_in_a_server() -> None:
    """The first view of each kind; `tests.contract` tries all of them in the kernel."""
    changed: dict[str, list[str]] = {}

    def does(ask: Any, view: Any) -> Any:
        name = type(view).__name__
        if name not in changed:
            changed[name] = changed_by(view)
        return ask(view)

    assert serve(does)["policy_faults"] == {}
    assert len(changed) > 6
    assert not any(changed.values()), changed


@pytest.mark.parametrize("odd", ODD[::6], ids=[one.name for one in ODD[::6]])
def test_odd_answers_harm_no_server(odd: Any) -> None:
    """A sample: `tests.contract` tries every odd answer in the kernel."""
    serve(lambda *_: odd.make())


@pytest.mark.parametrize("number", range(0, len(RAISES), 3))
def test_no_exception_ends_a_server(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, and logged with file, line and, once for each policy, the traceback."""

    def does(ask: Any, view: Any) -> Any:
        RAISES[number]()
        return ask(view)

    with caplog.at_level(logging.WARNING):
        faults = serve(does)["policy_faults"]
    assert len(faults) >= 6
    for name in faults:
        assert f"policy {name} failed at harmful.py:" in caplog.text
        assert caplog.text.count(f"policy {name} failed for the first time:\n") == 1
