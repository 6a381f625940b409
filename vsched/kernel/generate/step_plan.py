"""The plan of a step: its budget of prefill, its chunks, and its decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from vsched.kernel.decisions import ChunkPlan, GenerateDecision, Join
from vsched.kernel.request import RequestState
from vsched.policy import PrefillView, StepView
from vsched.policy.measured import Measured
from vsched.policy_host.seats import PolicySeat
from vsched.policy_host.shares import NONE_ADVANCES, decide_shares
from vsched.policy_host.step_times import PrefillBudget, StepTimeModel


@dataclass(slots=True)
class StepPlan:
    """A step that is being planned."""

    step: int
    budget: PrefillBudget
    passed_ns: int = 0
    joined: list[Join] = field(default_factory=list)
    chunks: list[ChunkPlan] = field(default_factory=list)
    prefilled: list[RequestState] = field(default_factory=list)


class PlanResult(msgspec.Struct, frozen=True):
    """Result of planning a step.

    Attributes:
        decision: The step; None if there is no work, or enough is in flight.
        requeued: Requests to put back into the queue: preempted, or without their embeddings.
        prefilled: Requests with a chunk in this step.
        more: Whether to plan again although the group has not changed: another step may follow this one, or a policy
            that let no request continue may decide otherwise after the next event.
    """

    decision: GenerateDecision | None = None
    requeued: Sequence[RequestState] = ()
    prefilled: Sequence[RequestState] = ()
    more: bool = False


NOTHING_PLANNED = PlanResult()


def prefill_shares(
    seat: PolicySeat,
    times: StepTimeModel,
    prefilling: Sequence[RequestState],
    plan: StepPlan,
    now_ns: int,
    *,
    passed_over_ns: int,
    decodes: int,
    waiting: int,
    measured: Measured,
) -> Iterator[tuple[RequestState, int | None]]:
    """Ask the step policy; yield requests to prefill and their maximum number of tokens, None for no limit.

    `prefilling` are in order of arrival. Requests that were left out for `passed_over_ns` come first. If nothing
    decodes and the answer led to no chunk, all requests follow: a share that ends before a missing embedding must not
    stop the others.
    """
    token_ns, pair_ns = times.costs()
    late_ns = now_ns - passed_over_ns
    late = [
        index
        for index, state in enumerate(prefilling)
        if state.advanced_ns <= late_ns and state.admitted_ns <= late_ns
    ]
    view = StepView(
        now_ns=now_ns,
        prefilling=tuple([_view(state) for state in prefilling]),
        waiting=waiting,
        decodes=decodes,
        tokens_free=plan.budget.tokens,
        time_ns=plan.budget.time_ns,
        decode_ns=times.decode_ns(decodes) if decodes else 0.0,
        token_ns=token_ns,
        pair_ns=pair_ns,
        overdue=tuple(late),
        measured=measured,
        state=seat.state,
    )
    decided = decide_shares(seat, view, plan.budget)
    if decided.left_out:
        left_out = [prefilling[index] for index in decided.left_out]
        plan.passed_ns = now_ns - min(max(one.advanced_ns, one.admitted_ns) for one in left_out)
    for index, most in decided.shares.items():
        yield prefilling[index], most
    if not (decodes or plan.chunks or decided.unlimited):
        seat.overrule(NONE_ADVANCES)
        for state in prefilling:
            yield state, None


def _view(state: RequestState) -> PrefillView:
    return PrefillView(
        tokens=len(state.tokens) - state.computed,
        computed=state.computed,
        priority=state.request.priority,
        arrived_ns=state.submitted_ns,
        joined_ns=state.admitted_ns,
        target_ns=state.target_ns,
        tenant=state.request.tenant,
        session=state.request.session,
        max_tokens=state.request.sampling.max_tokens,
    )
