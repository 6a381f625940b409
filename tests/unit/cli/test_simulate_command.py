"""`vsched simulate`: comparison of configurations, and the files that it writes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import msgspec
import pytest

from tests.commands import run_command
from tests.each_case import each_case
from tests.trace_format import check_trace_events
from tests.unit.sim.fast.test_recorded import load, record
from tests.unit.sim.shapes import COST, read_json
from vsched.cli.policy_commands import gallery
from vsched.errors import ConfigError
from vsched.sim.cost.model import save_cost_model
from vsched.terminal.options import check_writable

TRACE = "arrival_s,text_tokens,image_tokens,output_tokens\n" + "".join(
    f"{0.01 * number},20,{50 + number},{number % 7}\n" for number in range(20)
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_cost_model(COST, tmp_path / "cost.json")
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "a.toml").write_text("")
    (tmp_path / "b.toml").write_text("[encode.encoding]\nlook_ahead_chunks = 9\n")
    return tmp_path


def run(*words: str, status: int = 0) -> str:
    cost = [] if {"--swarm", "--probes"}.intersection(words) else ["--cost", "cost.json"]
    return run_command("simulate", *cost, *words, status=status)


def test_simulate_compares_configurations(folder: Path) -> None:
    said = run("-c", "a.toml", "-c", "b.toml", "--trace", "trace.csv", "--json", "out.json")
    policies = "ChunkAware(look_ahead_chunks=0) | ChunkAware(look_ahead_chunks=9)"
    assert f"encode.encoding: {policies}" in said
    assert "trace: 3 rows without output tokens were left out" in said
    assert "cost model test: made up" in said
    first, second = read_json(folder / "out.json")
    assert (first.label, second.label) == ("a", "b")
    assert first.figures.finished == second.figures.finished == 17


def test_simulate_compares_a_record_with_another_policy(folder: Path) -> None:
    record(folder, load())
    other = "generate.admission.use=shortest-first"
    said = run("--trace", "run.vlog", "--set", other, "--json", "o.json")
    assert "generate.admission: Fifo" in said
    assert "| ShortestFirst" in said
    assert "run.vlog: measured in the recorded run: 90 of 90 requests finished" in said
    own, changed = read_json(folder / "o.json")
    assert (own.label, changed.label) == ("as recorded", "changed")
    assert own.figures.tenants.keys() == {"tenant 0", "tenant 1"}
    assert changed.figures.ttft_ms.p50 < own.figures.ttft_ms.p50


def test_simulate_writes_the_requested_files(folder: Path) -> None:
    """A timeline for each configuration."""
    words = ["-c", "a.toml", "-c", "a.toml", "--requests", "5", "--oracles"]
    files = ["--html", "o.html", "--json", "o.json", "--timeline", "t.json"]
    said = run("--trace", "trace.csv", *words, *files)
    assert "wrote o.html" in said
    assert (folder / "o.html").read_text().startswith("<!doctype html>")
    assert (folder / "t-a-2.json").exists()
    timeline = msgspec.json.decode((folder / "t-a.json").read_bytes())
    check_trace_events(timeline["traceEvents"])
    names = {event.get("name") for event in timeline["traceEvents"]}
    assert {"r1", "encode 1", "decode"} <= names


def test_simulate_generates_a_workload(folder: Path) -> None:
    words = ("--workload", "thin-images", "--requests", "4", "--seed", "3", "--kv-tokens", "8000")
    run(*words, "--json", "one.json", "--set", "generate.slots=2")
    run(*words, "--json", "two.json", "--set", "generate.slots=2", "--speed", "1")
    (one,), (two,) = read_json(folder / "one.json"), read_json(folder / "two.json")
    assert one.digest == two.digest
    assert one.seed == 3


def test_simulate_loses_a_group(folder: Path) -> None:
    run("--trace", "trace.csv", "--outage", "generate:0.05:0.5", "--json", "one.json")
    (one,) = read_json(folder / "one.json")
    assert one.figures.finished == 17
    assert one.figures.span_s > 0.5


BROKEN = """
from vsched.policy import RequestPolicy

class Broken(RequestPolicy, frozen=True, kw_only=True):
    def admit(self, view):
        return 1 // 0
"""


@pytest.fixture
def broken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A policy of the user's that raises, and the option that names it."""
    (folder / "a_broken_policy.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "a_broken_policy", raising=False)
    (folder / "broken.toml").write_text('[generate.admission]\nuse = "a_broken_policy:Broken"\n')
    return "broken.toml"


def test_simulate_fails_if_a_policy_did(folder: Path, broken: str) -> None:
    said = run("-c", "a.toml", "-c", broken, "--trace", "trace.csv", status=1)
    assert f'File "{folder}/a_broken_policy.py", line 6, in admit' in said
    assert "return 1 // 0" in said
    assert "error: broken: Broken failed 17 times, and the default decided in its place." in said
    assert re.search(r"failures of Broken +│ +0 │ +17 │", said)


def swarm(*words: str, status: int = 0) -> str:
    return run("--swarm", "1", "--seed", "6", *words, status=status)


def test_simulate_accepts_an_output_file_in_a_folder_that_is_not_writable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "out.json").touch()
    monkeypatch.setattr(os, "access", lambda path, _mode: path == Path("out.json"))
    check_writable({"--json": Path("out.json")})
    with pytest.raises(ConfigError, match=r"--json new\.json: cannot be written"):
        check_writable({"--json": Path("new.json")})


def test_two_outputs_in_one_file_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_writable({"--html": out, "--json": tmp_path / "other"})
    check_writable({"--html": Path("/dev/null"), "--json": Path("/dev/null")})
    with pytest.raises(ConfigError, match=r"--json .*: --html has the same file\. Remedy: "):
        check_writable({"--html": out, "--json": tmp_path / "." / "out"})
    out.touch()
    with pytest.raises(ConfigError, match=r"out: cannot be created: File exists\. Remedy: "):
        gallery(out)


def test_output_in_place_of_the_input_is_refused(tmp_path: Path) -> None:
    """A record of a crash cannot be made again."""
    record, other = tmp_path / "run.vlog", tmp_path / "link"
    record.write_bytes(b"record")
    other.symlink_to(record)
    check_writable({"--json": tmp_path / "out"}, inputs=[record, tmp_path / "missing"])
    check_writable({"--json": Path("/dev/null")}, inputs=[Path("/dev/null")])
    for path in (record, other):
        with pytest.raises(ConfigError, match=r"--json .*: it is the input\. Remedy: "):
            check_writable({"--json": path}, inputs=[record])
        for words in (["replay", record, "--timeline"], ["simulate", "--trace", record, "--html"]):
            with pytest.raises(ConfigError):
                run_command(*words, path)
    assert record.read_bytes() == b"record"


def test_simulate_runs_a_swarm_with_policies_of_a_configuration(folder: Path, broken: str) -> None:
    """It reports the location of a failure, the ignored keys, and the command that repeats it."""
    said = swarm("-c", broken, "--set", "generate.slots=3", status=1)
    assert "policy Broken failed:" in said
    assert f'File "{folder}/a_broken_policy.py", line 6, in admit' in said
    assert "ignored, since the swarm draws the shapes of its engines: generate.slots" in said
    assert f"--swarm 1 --seed 6 --config={broken} --set=generate.slots=3" in said
    (folder / "plan.json").write_text("{}")
    said = swarm("-c", broken, "--faults", "plan.json", status=1)
    assert f"--swarm 1 --seed 6 --config={broken} --faults=plan.json" in said
    assert "1 scenarios in" in swarm("-c", "b.toml")


@each_case(
    ("words", "message"),
    [
        (["--trace", "trace.csv", "--workload", "poisson"], "give one of them"),
        (["--trace", "trace.csv", "--rate", "3"], "a trace has its own arrivals"),
        (["--workload", "nope"], "Known: poisson"),
        (["--trace", "trace.csv", "--outage", "generate"], "not GROUP:FROM_S:TO_S"),
        (["--trace", "trace.csv", "--outage", "generate:5:2"], "with an end after the start"),
        (["--trace", "trace.csv", "--outage", "generate:-5:2"], "not GROUP:FROM_S:TO_S"),
        (["--trace", "trace.csv", "--outage", "generate:5:inf"], "or as generate:60 for good"),
        (["--swarm", "1", "--faults", "nowhere.json"], "nowhere.json: No such file"),
        (["--trace", "trace.csv", "--timeline", "no/such/folder"], "cannot be written"),
        (["--trace", "trace.csv", "--json", "no/such"], "--json no/such: cannot be written"),
        (["--trace", "trace.csv", "--html", "."], "--html .: cannot be written"),
        (["--swarm", "1", "--rate", "3", "--html", "o.html"], "--rate, --html: is not used with"),
        (["--swarm", "1", "-c", "a.toml", "-c", "b.toml"], "value 2 files, limit one"),
        (["--swarm", "1", "--set", "routing.use=no_module:Mine"], "routing.use: .*no_module"),
        (["--swarm", "1", "-c", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["--probes"], "add --swarm N"),
        (["--trace", "trace.csv", "--faults", "plan.json"], "--faults: needs --swarm"),
    ],
)
def test_simulate_reports_wrong_arguments(folder: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*words)


@each_case(
    "words",
    [
        ["bench", "fidelity", "nowhere", "--json"],
        ["bench", "serve", "--json"],
        ["calibrate-vllm", "nowhere", "--output"],
        ["check", "nowhere", "--json"],
        ["policies", "try", "token-budget", "--html"],
        ["profile", "nowhere", "--json"],
        ["replay", "nowhere", "--json"],
        ["tune", "nowhere", "--json"],
        ["tune", "nowhere", "--write"],
    ],
)
def test_output_that_cannot_be_written_is_refused_first(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{words[-1]} {tmp_path}/none/out: cannot be written"):
        run_command(*words, tmp_path / "none" / "out")
