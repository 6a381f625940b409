"""Pruning of videos: plans of what is left, and policies that fail."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from tests.each_case import each_case
from tests.unit.media.fakes import FakePreprocessor
from vsched.config import LoadedConfig, load_config
from vsched.config.policies import check_replacement
from vsched.config.sections import PoliciesConfig
from vsched.errors import ConfigError
from vsched.media.pruning import Pruning, make_pruning
from vsched.policy import PruningPolicy, PruningView
from vsched.types import Spans
from vsched.worker.contract import FrameSize, ImagePlan, VideoPlan
from vsched.worker.expansion import expand_images
from vsched_policies.pruning import MostChanged

VIDEO = 9


def plan_of(groups: int, rows: int = 2, columns: int = 2, *, timestamps: bool = False) -> VideoPlan:
    tokens = rows * columns
    expansions: list[tuple[int, ...]] = [() for _ in range(groups)]
    if timestamps:
        expansions = [(100 + index, *[VIDEO] * tokens, 200) for index in range(groups)]
    made = tuple(ImagePlan((), tokens, expansion) for expansion in expansions)
    frames = tuple(range(2 * groups))
    return VideoPlan(frames, FrameSize(1, 1), made, grid=(rows, columns))


def changes_of(*groups: tuple[float, ...]) -> list[bytes]:
    """Return changes of the groups after the first."""
    return [b"", *(array("f", group).tobytes() for group in groups)]


def made(policy: PruningPolicy) -> Pruning:
    found = make_pruning(policy, PoliciesConfig(call_budget_ms=5.0, slow_calls_max=0))
    assert found is not None
    return found


STILL, MOVED = (0.0,) * 4, (0.0, 0.5, 0.25, 0.0)


@pytest.mark.parametrize("timestamps", [False, True])
async def test_plans_keep_the_most_changed_tokens(timestamps: bool) -> None:
    """A group without tokens is left out with its timestamp; placeholders follow each other."""
    pruning = made(MostChanged(rate=0.6))
    plan = plan_of(4, timestamps=timestamps)
    assert pruning.tokens_max(plan) == 6
    assert pruning.tokens_saved(plan) == 10
    found = await pruning.prune(plan, changes_of(STILL, MOVED, (0.1,) * 4), VIDEO)
    assert [group.kept for group in found.groups] == [None, (), ((1, 3),), ()]
    assert [group.placeholders for group in found.groups] == [4, 0, 2, 0]
    ids, spans = expand_images([1, VIDEO, 2], [found], placeholder=8, video=VIDEO)
    if timestamps:
        assert ids == [1, 100, *[VIDEO] * 4, 200, 102, VIDEO, VIDEO, 200, 2]
        assert spans == [((2, 6),), ((8, 10),)]
    else:
        assert ids == [1, *[VIDEO] * 6, 2]
        assert spans == [((1, 5),), ((5, 7),)]
    pruning.close()


@each_case(
    ("policy", "kept"),
    [
        (MostChanged(rate=0.5), [None, ((0, 2),), ()]),
        (MostChanged(rate=0.0), [None, None, None]),
        (MostChanged(rate=0.0, threshold=0.03), [None, ((0, 3),), ((0, 1), (2, 4))]),
    ],
)
async def test_threshold_prunes_more_and_ties_keep_earlier_tokens(
    policy: MostChanged, kept: list[Spans | None]
) -> None:
    changes = changes_of((0.5, 0.5, 0.5, 0.0), (0.5, 0.02, 0.5, 0.5))
    pruning = made(policy)
    plan = await pruning.prune(plan_of(3), changes, VIDEO)
    assert [group.kept for group in plan.groups] == kept
    pruning.close()


def all_but(*pruned: int) -> bytes:
    return bytes(at not in pruned for at in range(16))


def force(view: PruningView) -> bytes:
    view.changes[0, 0, 0] = 2.0
    return b""


@pytest.mark.parametrize(
    "prune",
    [
        Mock(side_effect=SystemExit),
        force,
        lambda view: None,
        lambda view: [1] * 16,
        lambda view: bytearray(16),
        lambda view: b"",
        lambda view: b"\1" * 15,
        lambda view: b"\1" * 16,
        lambda view: b"\1" * 4 + b"\2" * 4 + bytes(8),
        lambda view: all_but(3, *range(8, 16)),
        lambda view: array("f", [float("nan")] * 4).tobytes(),
    ],
)
async def test_default_decides_for_failing_policies(prune: Callable[[PruningView], bytes]) -> None:
    """Whole groups at equal distances, within the tokens that were planned."""

    class Failing(PruningPolicy, frozen=True, kw_only=True):
        def prune(self, view: PruningView) -> bytes:
            return prune(view)

    pruning = made(Failing(rate=0.4))
    found = await pruning.prune(plan_of(4), changes_of(MOVED, MOVED, MOVED), VIDEO)
    assert [group.kept for group in found.groups] == [None, (), None, ()]
    assert pruning.figures()["policy_faults"] == {"Failing": 1}
    assert pruning.failed == {"media.pruning": 1}
    pruning.close()


async def test_a_slow_policy_is_replaced() -> None:
    class Slow(PruningPolicy, frozen=True, kw_only=True):
        def prune(self, view: PruningView) -> bytes:
            time.sleep(0.02)
            return all_but(*range(8, 16))

    pruning, changes = made(Slow(rate=0.5)), changes_of(MOVED, MOVED, MOVED)
    for placeholders in ([4, 4, 0, 0], [4, 0, 4, 0]):
        found = await pruning.prune(plan_of(4), changes, VIDEO)
        assert [group.placeholders for group in found.groups] == placeholders
    assert "media.pruning" in pruning.figures()["policy_replaced"]
    pruning.close()


def test_rate_is_configured_and_no_video_is_pruned_without_it() -> None:
    def load(*sets: str) -> LoadedConfig:
        return load_config(None, sets=sets, environ={})

    assert load("media.pruning.rate=0.75").policies.pruning == MostChanged(rate=0.75)
    plain = load()
    assert make_pruning(plain.policies.pruning, PoliciesConfig()) is None
    with pytest.raises(ConfigError, match=r"media\.pruning.*rate"):
        load("media.pruning.rate=1")
    with pytest.raises(ConfigError, match="restart"):
        check_replacement(plain.config, plain.policies, {"media.pruning": {"use": "most-changed"}})
    pruning = made(MostChanged(rate=0.5))
    with pytest.raises(ConfigError, match=r"media\.pruning\.rate: the videos of this model"):
        pruning.check_model(FakePreprocessor())
    pruning.close()
