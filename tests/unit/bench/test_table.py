"""The table of all sides: rounds on servers with canned responses, resuming, and the page."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tests.bench import options, report, table, timeline
from tests.bench.options import TABLED
from tests.bench.records import Key, Run, Store
from tests.bench.servers import session as sessions
from tests.bench.servers.server import HOST, Spec
from tests.bench.servers.sides import spec_of
from tests.each_case import each_case
from tests.host_process import free_port
from vsched.bench.load.generator import Answers, Times, summarise
from vsched.errors import ConfigError

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("asked", len(str(body["messages"])), flush=True)
        self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
        said = [{"choices": [{"delta": {"content": "a"}}]}] * body["max_tokens"]
        said += [{"usage": {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}}]
        data = b"".join(b"data: " + json.dumps(one).encode() + b"\\n\\n" for one in said)
        self.wfile.write(b"%x\\r\\n%b\\r\\n0\\r\\n\\r\\n" % (len(data), data))
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SIDES = ["vsched", "vsched-best", "llamacpp"]


def parsed(folder: Path, *words: str) -> argparse.Namespace:
    line = ["table", "--out", str(folder / "runs"), "--peers", "p", "--idle-s", "0"]
    line += ["--cases", "text", "--concurrency", "1,8", "--models", "mid25", "--repeats", "2"]
    return options.make_parser().parse_args([*line, "--sides", ",".join(SIDES), *words])


def fake(side: str, *, version: str = "1", code: str = SERVER) -> Spec:
    port = free_port(HOST)
    command = [sys.executable, "-S", "-c", code, str(port)]
    return Spec(side=side, command=command, model="m", port=port, version=f"{side} {version}")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Spec]:
    """Server specifications by side, which a test may change."""
    result = {side: fake(side) for side in SIDES}
    monkeypatch.setattr(table, "checkpoint_of", lambda *_: Path())
    monkeypatch.setattr(table, "specs_of", lambda *_: list(result.values()))
    monkeypatch.setattr(sessions, "SETTLE_S", 0.0)
    return result


def run_table(found: argparse.Namespace) -> str:
    """Return the output of the command."""
    said = io.StringIO()
    try:
        table.table(found, Console(file=said, width=200))
    except ConfigError as error:
        said.write(f"error: {error}")
    return said.getvalue()


def starts_of(found: argparse.Namespace) -> list[str]:
    return [one.side for one in Store(found.out).report.starts]


@pytest.mark.slow
def test_each_side_is_started_once_a_round_and_nothing_is_measured_twice(
    tmp_path: Path, servers: dict[str, Spec]
) -> None:
    """A side that does not start keeps no other from being measured; later, only what is missing is measured."""
    servers["vsched-best"] = fake("vsched-best", code="raise SystemExit('no such setting')")
    first_round, both = parsed(tmp_path, "--repeats", "1"), parsed(tmp_path)
    said = run_table(first_round)
    assert "no such setting" in said
    assert "error: not all was measured: vsched-best with mid25. Remedy" in said
    assert {run.key.side for run in Store(both.out).report.runs} == {"vsched", "llamacpp"}
    servers["vsched-best"] = fake("vsched-best")
    assert "4 of 6 cells; now vsched-best with mid25" in run_table(first_round)
    begun = starts_of(both)
    assert "error" not in run_table(both)
    assert starts_of(both) == [*begun, *SIDES[::-1]], "the second round begins with the last side"
    runs = Store(both.out).report.runs
    assert len(runs) == 12
    assert {(run.figures.failed, run.figures.wrong_length) for run in runs} == {(0, 0)}
    assert (both.out / "table-mid25.md").exists()
    assert "; now " not in run_table(both)
    servers["vsched"] = fake("vsched", version="2")
    run_table(both)
    assert starts_of(both) == [*begun, *SIDES[::-1], "vsched", "vsched"], "the peers are unchanged"
    assert len(Store(both.out).report.runs) == 12


def test_sides_of_vsched_have_the_settings_of_their_names(tmp_path: Path) -> None:
    found = parsed(tmp_path, "--best", "mid25:placement=together")
    found.sides = ["vsched", "vsched-best", "vsched-int8", "vsched-int4"]
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"vision_config": {}}))
    default, best, eight, four = table.specs_of(found, "mid25", tmp_path)
    assert default.command == spec_of(tmp_path, []).command, "the defaults"
    assert best.command[-2:] == ["--set", "placement=together"]
    for spec, weights in ((eight, "int8"), (four, "int4")):
        stages = [f"{stage}.weights={weights}" for stage in ("encode", "generate")]
        for setting in ("placement=together", *stages):
            assert setting in spec.command
            assert setting in spec.version, "other settings are measured again"
    assert "with" not in default.version


def made(
    side: str, rate: float, *, repeat: int = 0, neighbours: int = 0, tpot: float = 10.0
) -> Run:
    key = Key(
        purpose=table.PURPOSE,
        side=side,
        case="text",
        concurrency=1,
        repeat=repeat,
        checkpoint="mid25",
        settings="",
        neighbours=neighbours,
    )
    spread = Times(p50=tpot, p95=tpot, p99=tpot, mean=tpot, worst=tpot)
    none = summarise("text", 1, Answers())
    figures = msgspec.structs.replace(none, requests_s=rate, requests=4, tpot_ms=spread)
    return Run(key=key, figures=figures, version="v", taken="t", load=0)


def sides_of(**rates: Sequence[float]) -> dict[str, list[Run]]:
    return {
        side.replace("_", "-"): [made(side, rate, repeat=at) for at, rate in enumerate(found)]
        for side, found in rates.items()
    }


def test_ratios_are_of_the_same_round() -> None:
    """A noisy minute that halves both runs of a round leaves its ratio."""
    found = sides_of(vsched=[1, 2], llamacpp=[1, 2], vsched_best=[2, 3])
    found["vsched"].reverse()
    for side, wanted in (("vsched", [1.0, 1.0]), ("vsched-best", [2.0, 1.5])):
        pairs = report.ratios(found[side], found["llamacpp"], report.requests_s)
        assert sorted(pairs, reverse=True) == wanted


def test_a_cell_is_missed_by_the_best_peer_of_its_precision() -> None:
    found = sides_of(vsched_best=[1.0], vsched_int8=[1.0], llamacpp=[0.5], openvino=[0.95])
    found |= {"openvino-int8": [made("openvino-int8", 0.5, tpot=9)]}
    missed = [line.split() for line in table.missed(found, "mid25").splitlines()[2:]]
    assert [(words[4], words[6], words[-1]) for words in missed] == [
        ("16", "1.05", "openvino"),
        ("8", "TPOT", "openvino-int8"),
    ]
    assert table.missed(sides_of(vsched_best=[2], vllm=[1]), "mid25").startswith("No cell")


def test_share_that_is_kept_next_to_neighbours_is_of_the_same_round() -> None:
    found = sides_of(vsched=[1.0, 2.0], vllm=[1.0, 1.0])
    for side, rates in (("vsched", (0.5, 0.8)), ("vllm", (0.3, 0.5))):
        found[side] += [
            made(side, rate, repeat=index, neighbours=1) for index, rate in enumerate(rates)
        ]
    quiet, loaded = table.places(found, "mid25")
    for side, wanted in (("vsched", [0.5, 0.4]), ("vllm", [0.3, 0.5])):
        assert table.kept_of(found, side, quiet) == []
        assert table.kept_of(found, side, loaded) == wanted
    (missed,) = table.missed(found, "mid25").splitlines()[2:]
    assert "vsched keeps" in missed, "1.6 times vLLM in the same condition"


def test_page_replaces_the_text_between_its_markers(tmp_path: Path) -> None:
    """The page of benchmarks has a place for each result."""
    path, before = tmp_path / "page.md", "# Title\n\n<!-- bench: one -->\nold\n<!-- end: one -->\n"
    path.write_text(before)
    for _ in range(2):
        report.write(path, "one", r"new \1 text")
        assert path.read_text() == before.replace("old\n", "\nnew \\1 text\n\n")
    for name in [f"{command}-{model}" for command in ("table", "timeline") for model in TABLED]:
        page = report.holding(options.PAGES, name).read_text()
        assert "\nfound\n" in report.replaced(page, name, "found")


SECONDS = (10, 20, 15)


@each_case(("after", "late", "expected"), [(10.0, 0, 0.0), (9.6, 3, 1.5), (9.0, 0, None)])
def test_rate_is_back_when_it_holds_95_percent(
    after: float, late: int, expected: float | None
) -> None:
    """Of intervals of half a second; the last stretch begins late by some."""
    rates = [10.0] * 20 + [4.0] * (40 + late) + [after] * (30 - late)
    assert timeline.back_s(rates, SECONDS) == expected


def test_rates_count_each_piece_as_its_share_of_a_request() -> None:
    pieces = [(-0.1, 0.5), (0.0, 0.5), (0.4, 0.5), (0.5, 1.0), (1.9, 0.25), (2.0, 1.0)]
    assert timeline.rates_of(pieces, 2) == [2.0, 2.0, 0.0, 0.5]
