"""Lines that the bench of starts reads in a server's log."""

from __future__ import annotations

from pathlib import Path

from tests.bench.servers.sides import spec_of
from tests.bench.servers.start import stages

LOG = """2026-11-25 23:59:59.500 INFO [engine] vsched.loading: encode: loading the vision tower
2026-11-25 23:59:59.900 INFO [generate rank 0] vsched.rank: something else
2026-11-26 00:00:01.750 INFO [engine] vsched.serve: tiny25 is served at http://127.0.0.1:1/v1
a line of something else
"""


def test_stages_are_those_of_the_engine_by_seconds_over_midnight() -> None:
    assert list(stages(LOG)) == [
        (0.0, "encode: loading the vision tower"),
        (2.2, "tiny25 is served at http://127.0.0.1:1/v1"),
    ]


def test_settings_reach_the_command() -> None:
    command = spec_of(Path("/somewhere/tiny25"), ["placement=together"]).command
    assert command[-2:] == ["--set", "placement=together"]
    assert "/somewhere/tiny25" in command
