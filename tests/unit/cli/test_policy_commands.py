"""`vsched policies try`: errors of a policy, and a comparison with the built-ins."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.commands import run_command
from tests.each_case import each_case
from vsched.errors import VschedError
from vsched.sim.gallery import CASES, GalleryCase
from vsched.terminal import options
from vsched.testing import policy_trial
from vsched.testing.policy_trial import Effort

POLICIES = '''
import time

import msgspec

from vsched.policy import Admission, AdmissionView, PreemptionView, RequestPolicy


class Calls(msgspec.Struct):
    admissions: int = 0


class Two(RequestPolicy, frozen=True, kw_only=True):
    """Preempts only if the calls of `admit` are known: they share one state."""

    state_type = Calls
    spare: int = 0

    def admit(self, view: AdmissionView) -> Admission:
        view.state.admissions = 1
        return Admission(range(min(len(view.waiting), view.entries_free)))

    def victim(self, view: PreemptionView) -> int:
        assert view.state.admissions == 1, "another state"
        return 0


class Broken(RequestPolicy, frozen=True, kw_only=True):
    def admit(self, view: AdmissionView) -> Admission:
        raise LookupError("a bug")


class Slow(RequestPolicy, frozen=True, kw_only=True):
    def admit(self, view: AdmissionView) -> Admission:
        if view.now_ns > 11_000_000_000:
            time.sleep(0.05)
        return Admission(range(min(len(view.waiting), view.entries_free)))
'''


def shortened(case: GalleryCase) -> GalleryCase:
    return dataclasses.replace(case, workload=lambda: case.workload().first(120))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a user with policies, in which a trial is short."""
    (tmp_path / "tried_policies.py").write_text(POLICIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    short = Effort(schedules=2, scenarios=1, all_cases=False, seconds=60.0)
    monkeypatch.setattr(policy_trial, "QUICK", short)
    few = {name: shortened(CASES[name]) for name in ("long-answers", "long-context")}
    monkeypatch.setattr(policy_trial, "CASES", few)
    monkeypatch.setattr(options, "PIPE_COLUMNS", 300)
    yield tmp_path
    sys.modules.pop("tried_policies", None)


def tried(*words: str, status: int = 0) -> str:
    return run_command("policies", "try", "--quick", *words, status=status)


def test_try_compares_a_policy_with_one_state_by_tenant(folder: Path) -> None:
    said = tried("tried_policies:Two", "--set", "spare=1", "--html", "trial.html")
    assert "tried_policies:Two, at generate.admission, generate.preemption" in said
    for words in ("Contract: passed", "Swarm: passed", "talks", "documents", "longest wait"):
        assert words in said
    assert "answers overruled" in said
    assert "youngest, swap" in said
    deployed = " ".join(said.partition("To deploy it:")[2].split())
    seats = '["generate.admission", "generate.preemption"]'
    assert f'[policy] use = "tried_policies:Two" seats = {seats} spare = 1' in deployed
    page = (folder / "trial.html").read_text()
    assert "Contract: passed" in page
    assert 'name="viewport"' in page, "a phone does not shrink it to the width of a desktop"
    frames = re.findall(r'<summary>(.+?)</summary><iframe srcdoc="([^"]+)"', page)
    assert frames, "each case of the gallery has its report with charts"
    assert all("Latency by percentile" in frame and "Two" in frame for _, frame in frames)
    assert not re.search(r"(src|href)=(\"|&quot;|&#34;)http", page), "it loads nothing"


@pytest.mark.usefixtures("folder")
def test_try_shows_the_traceback_of_a_failure_once() -> None:
    said = tried("tried_policies:Broken", status=1)
    assert said.count("in admit") == 3, "in the message, and in both tracebacks"
    assert "vsched.testing.check_policy(Broken, seeds=[0])" in said
    assert "--swarm 1 --seed 0 '--set=policy.use=\"tried_policies:Broken\"'" in said
    assert "FAILED: mend the problems" in said


@pytest.mark.usefixtures("folder")
def test_try_stops_a_slow_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Effort(schedules=1, scenarios=1, all_cases=False, seconds=0.2)
    monkeypatch.setattr(policy_trial, "QUICK", short)
    said = tried("tried_policies:Slow")
    assert "too slow: stopped" in said
    assert "No check failed, but its calls are slow. To deploy it" in said
    assert "Nothing failed" not in said


@pytest.mark.usefixtures("folder")
def test_try_says_that_no_case_called_a_policy() -> None:
    said = tried("tried_policies:Two", "--seat", "encode.admission")
    assert "encode.admission: these cases never called it" in said


@pytest.mark.usefixtures("folder")
def test_try_does_not_count_waiting_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to other programs, a fast policy is not slow."""
    clock_ns = iter([0, 5_000_000_000])
    waited_ns = iter([0, 4_999_000_000])
    clock = SimpleNamespace(perf_counter_ns=lambda: next(clock_ns))
    monkeypatch.setattr(policy_trial, "time", clock)
    monkeypatch.setattr(policy_trial, "QueueClock", lambda: lambda: next(waited_ns))
    watch = policy_trial.CallWatch({"generate.step": {}}, seconds=1.0)
    assert watch("generate-0.step", lambda view: view)("answer") == "answer"
    assert watch.seats["generate.step"].total_ns == 1_000_000


@pytest.mark.thorough
@pytest.mark.usefixtures("folder")
def test_try_has_a_draft_model_for_a_policy_that_asks_for_it() -> None:
    said = tried("draft-model")
    assert "Swarm: passed" in said
    assert "Nothing failed. To deploy it:" in said


@pytest.mark.usefixtures("folder")
@each_case(
    ("words", "message"),
    [
        (["tried_policies:Two", "--seat", "routing"], "no table for which Two has a method"),
        (["tried_policies:Two", "--set", "spare"], "not an assignment"),
        (["tried_policies:Two", "--set", "spre=1"], "Did you mean spare?"),
        (["yungest"], "Did you mean youngest?"),
        (["none"], "several policies"),
    ],
)
def test_try_refuses_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(VschedError, match=message):
        run_command("policies", "try", *words)
