"""Pruning of videos: the policy call after decoding, and the plan without pruned tokens.

It is no decision of the kernel: the request contains its result, and so do snapshots and replays. The maximum number of
kept tokens follows from the header, so that prompts that do not fit are refused before decoding.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vsched.errors import ConfigError
from vsched.policy import PruningPolicy, PruningView
from vsched.policy_host import SeatPolicies
from vsched.policy_host.host import PolicyHost
from vsched.worker.contract import ImagePlan, Preprocessor, VideoPlan

if TYPE_CHECKING:
    from vsched.config.sections import PoliciesConfig

logger = logging.getLogger(__name__)

TABLE: Final = "media.pruning"
_RUNS: Final = re.compile(b"\1+")


class Pruning:
    """The seat of the pruning policy, which is called in a thread of its own: it sorts the tokens of long videos.

    `rate` is the minimum share of tokens to prune.
    """

    def __init__(
        self, policy: PruningPolicy, rate: float, *, budget_ms: float = 0.0, slow_max: int = 0
    ) -> None:
        """Create the seat; see `PolicyHost`."""
        self._rate = rate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pruning")
        # Created in the thread whose waits for a core it measures.
        self._host: PolicyHost = self._thread.submit(
            PolicyHost,
            SeatPolicies(by_table={TABLE: policy}),
            now_ns=time.monotonic_ns,
            log=logger,
            budget_ms=budget_ms,
            slow_max=slow_max,
        ).result()

    def check_model(self, preprocessor: Preprocessor) -> None:
        """Check that the model's videos can be pruned.

        Raises:
            ConfigError: If they cannot.
        """
        if not (preprocessor.info.takes_videos and preprocessor.prunes_videos):
            raise ConfigError(
                f"{TABLE}.rate: the videos of this model cannot be pruned. Remedy: leave it out"
            )

    def tokens_max(self, plan: VideoPlan) -> int:
        """Return the maximum number of tokens of a video after pruning; the first group stays whole."""
        return max(plan.groups[0].tokens, int(_tokens(plan) * (1 - self._rate)))

    def tokens_saved(self, plan: VideoPlan) -> int:
        """Return the minimum number of tokens to prune."""
        return _tokens(plan) - self.tokens_max(plan)

    async def prune(self, plan: VideoPlan, changes: Sequence[bytes], placeholder: int) -> VideoPlan:
        """Return the plan of a video without pruned tokens.

        `changes` has the changes of each group's tokens, float32; the first entry is not used.
        """
        work = self._thread.submit(self._prune, plan, changes, placeholder)
        return await asyncio.wrap_future(work)

    def _prune(self, plan: VideoPlan, changes: Sequence[bytes], placeholder: int) -> VideoPlan:
        rows, columns = plan.grid
        groups, tokens = len(plan.groups), rows * columns
        first = array("f", [1.0]) * tokens
        view = PruningView(
            groups=groups,
            rows=rows,
            columns=columns,
            changes=memoryview(b"".join([first.tobytes(), *changes[1:]])).cast(
                "f", [groups, rows, columns]
            ),
            tokens_max=self.tokens_max(plan),
        )
        seat = self._host.seat(TABLE)
        assert seat is not None
        kept: bytes = seat.decide(view, groups, tokens, view.tokens_max)
        self._host.log_notices()
        return replace(
            plan,
            groups=tuple(
                pruned_group(
                    group,
                    kept[index * tokens : (index + 1) * tokens],
                    placeholder if plan.row_token is None else plan.row_token,
                    keeps_text=plan.row_token is not None,
                )
                for index, group in enumerate(plan.groups)
            ),
        )

    def figures(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the calls, failures and replacement of the policy, by their names in statistics."""
        figures = self._host.figures()
        return {
            name: figures[name] for name in ("policy_calls", "policy_faults", "policy_replaced")
        }

    @property
    def failed(self) -> Mapping[str, int]:
        """Number of failed calls by seat."""
        return self._host.seats.failed()

    def close(self) -> None:
        """Stop the thread once it is idle."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def make_pruning(policy: PruningPolicy, limits: PoliciesConfig) -> Pruning | None:
    """Create the seat of a policy; None if its `rate` is not set."""
    if policy.rate is None:
        return None
    return Pruning(
        policy, policy.rate, budget_ms=limits.call_budget_ms, slow_max=limits.slow_calls_max
    )


def _tokens(plan: VideoPlan) -> int:
    return sum(group.tokens for group in plan.groups)


def pruned_group(group: ImagePlan, kept: bytes, row_token: int, *, keeps_text: bool) -> ImagePlan:
    """Return the plan of a frame group with the kept rows; without any, its text may stay."""
    if not kept.count(0):
        return group
    rows = iter(kept)
    expansion = [token for token in group.expansion if token != row_token or next(rows)]
    spans = tuple(run.span() for run in _RUNS.finditer(kept))
    keeps_text = keeps_text or bool(spans)
    return replace(group, kept=spans, expansion=tuple(expansion) if keeps_text else ())
