"""The command for ten minutes with a GPU: its steps, the package for a machine without a network, lower bounds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.bench.gpu import __main__ as command
from tests.bench.gpu import pack
from tests.bench.gpu import steps as gpu_steps
from tests.bench.gpu.costs import SHAPES
from tests.bench.gpu.page import page
from tests.bench.gpu.revision import UNKNOWN, revision_of, write_revision
from tests.bench.gpu.steps import LOG, Step, StepResult, run_steps
from tests.patience import NEVER_S, wait_until
from tests.traces import is_alive


def python(name: str, code: str, limit_s: float = NEVER_S) -> Step:
    return Step(name, [sys.executable, "-c", IMPORTS + code], limit_s)


def written(folder: Path) -> list[StepResult]:
    return msgspec.json.decode((folder / "steps.json").read_bytes(), type=list[StepResult])


def outputs(folder: Path) -> dict[str, str]:
    _, *parts = re.split(r"^== (.*) ==\n", (folder / LOG).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


IMPORTS = "import atexit, pathlib, signal, subprocess, time; "
SLEEPER = "print(subprocess.Popen(['sleep', '9999']{}).pid, flush=True)"


@pytest.mark.slow
def test_a_step_that_fails_or_hangs_does_not_end_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that ignores its timeout, or cannot be started; no process of a step outlives it.

    At its timeout, a step can still write its report.
    """
    monkeypatch.setattr(gpu_steps, "END_S", 1.5)  # for the deaf one
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN); "
    in_session = SLEEPER.format(", start_new_session=True")
    steps = [
        python("fails", "print('a reason'); raise SystemExit(3)"),
        python("hangs", "atexit.register(print, 'a report'); time.sleep(1e4)", 3.0),
        python("deaf", f"{deaf}{in_session}; time.sleep(1e4)", 3.0),
        Step("missing", ["/nowhere/at/all"], NEVER_S),
        python("leaves", SLEEPER.format("")),
        python("reads", f"print(pathlib.Path({str(tmp_path / 'steps.json')!r}).read_text())"),
    ]
    results = run_steps(steps, tmp_path, seconds=NEVER_S, environment=os.environ)
    endings = ["failed", "out of time", "out of time", "failed", "done", "done"]
    assert [each.ending for each in results] == endings
    assert results[0].status == 3
    assert written(tmp_path) == results
    found = outputs(tmp_path)
    assert found["fails"] == "a reason\n"
    assert "a report\n" in found["hangs"]
    assert "/nowhere/at/all" in found["missing"]
    assert '"leaves"' in found["reads"], "results are on disk at once"
    pids = [int(found[name]) for name in ("deaf", "leaves")]
    wait_until(lambda: not any(map(is_alive, pids)))


def test_no_step_begins_when_the_time_is_up(tmp_path: Path) -> None:
    results = run_steps([python("late", "pass")], tmp_path, seconds=0, environment={})
    assert [each.ending for each in results] == ["not begun"]
    assert written(tmp_path) == results


def ended(name: str, _: bool, *, device: str) -> str:
    """Compare an architecture on a device, as one that ends its process."""
    if name == "llama":
        os._exit(1)
    return f"equal on {device}"


@pytest.mark.slow
def test_an_architecture_that_ends_its_process_does_not_end_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_device: Any = pytest.importorskip("tests.parity.on_device")
    monkeypatch.setattr(on_device, "result_of", ended)
    file, names = tmp_path / "parity.json", ["llama", "qwen3", "mistral"]
    on_device.compare_on_device(names, "here", jobs=1, to=file)
    rows = msgspec.json.decode(file.read_bytes())["rows"].values()
    assert [*rows] == ["its process ended", "equal on here", "equal on here"]


def test_a_case_that_fails_does_not_end_the_other_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    models: Any = pytest.importorskip("tests.bench.gpu.models")
    unused = dict.fromkeys(("model", "watch", "device", "wrote"))
    model = models.ModelBench(name="nano", full=False, few=False, weights="auto", **unused)
    measured: list[object] = []
    monkeypatch.setattr(model, "_decode", fail)
    for name in ("_prefill", "_encode"):
        monkeypatch.setattr(model, name, lambda first, _: measured.append(first))
    model.run("steps")
    assert (measured, model.failed) == ([0, 32, "tiny"], 2)


PYTHON = "3.12"


def test_every_carried_package_has_a_version_in_the_constraints() -> None:
    """The command line, the server, the models, the grammars and the tests have theirs."""
    found = pack.needed(pack.roots(), pack.installed, python=PYTHON)
    assert set(found) <= pack.pins().keys()
    carried = "typer pydantic-core uvicorn transformers llguidance pytest-asyncio"
    assert set(carried.split()) <= set(found)
    assert not {"torch", "mpmath", "llvmlite"} & set(found)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one commit."""
    root = tmp_path / "tree"
    (root / "vsched").mkdir(parents=True)
    (root / "vsched/one.py").write_text("one = 1\n")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    return root


def test_packed_commit_is_used_without_a_repository(tree: Path, tmp_path: Path) -> None:
    """Changes since the commit are reported."""
    commit, packed = revision_of(tree, None), tmp_path / "wheels"
    assert len(commit) == 8
    packed.mkdir()
    assert revision_of(tmp_path, packed) == UNKNOWN
    write_revision(tree, packed)
    (tree / "vsched/one.py").write_text("one = 2\n")
    assert revision_of(tree, None) == f"{commit}-dirty"
    (tree / "vsched/one.py").write_text("one = 1\n")
    (tree / ".git").rename(tmp_path / "elsewhere")
    assert revision_of(tree, None) == UNKNOWN
    assert revision_of(tree, packed) == commit
    (tree / "vsched/two.py").write_text("")
    assert revision_of(tree, packed) == f"{commit} with later changes"


def test_decode_of_the_3b_shape_is_as_written_out() -> None:
    """3.09 G weights of two bytes and 36,864 bytes a token; two operations a weight, four a value of a key."""
    cost = SHAPES["3b"].decode(8, 1024)
    weights = 36 * (2 * 2048**2 + 2 * 2048 * 256 + 3 * 2048 * 11008) + 2048 * 151936
    assert cost.moved == 2 * weights + 8 * 1024 * 36_864
    assert cost.operations == 8 * (2 * weights + 4 * 36 * 2048 * 1024)


@pytest.mark.slow
@pytest.mark.thorough
def test_dry_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps without another test: servers under load and killed ranks are tested elsewhere."""
    pytest.importorskip("torch")
    cpu = ["--device=cpu", "--models=nano", "--served=nano25", "--seconds=280"]
    only = "--only=models-nano,checkpoint,conversations,weights"
    monkeypatch.setattr(sys, "argv", ["gpu", f"--out={tmp_path}", *cpu, only])
    assert command.main() == 0, (tmp_path / LOG).read_text()[-8000:]
    names = sorted(each.name for each in tmp_path.rglob("*"))
    assert names == ["figures.json", "machine.json", "steps.json", "steps.log"]
    made = page(tmp_path)
    for expected in (
        "| decode 3 x 32 |",
        "| decode 1 x 32 int4 |",
        "| tiny turn 8 |",
        "| checkpoint | done |",
    ):
        assert expected in made
