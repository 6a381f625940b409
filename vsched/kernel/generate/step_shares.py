"""Sharing the prefill of a step: the step policy decides, and the kernel ensures that all requests progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vsched.kernel.generate.step_budget import StepPlan, StepTimeModel
from vsched.kernel.policy_seats import PolicySeat
from vsched.kernel.request import RequestState
from vsched.policy import PrefillView, StepShares, StepView
from vsched.policy.checks import PASSED_OVER
from vsched.policy.measured import Measured


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
    answer: StepShares = seat.decide(view, len(prefilling))
    if answer.time_ns is not None and not late:
        plan.budget.limit_time(answer.time_ns)
    shares: dict[int, int | None] = dict.fromkeys(answer.order)
    if answer.tokens is not None:
        shares = {index: most for index, most in zip(shares, answer.tokens, strict=True) if most}
    if len(shares) < len(prefilling):
        left_out = [state for index, state in enumerate(prefilling) if index not in shares]
        plan.passed_ns = now_ns - min(max(one.advanced_ns, one.admitted_ns) for one in left_out)
    if any(index not in shares for index in late):
        seat.overrule(PASSED_OVER)
    for index in late:
        if index not in shares:
            yield prefilling[index], None
    for index, most in shares.items():
        yield prefilling[index], most
    tried = answer.tokens is None and len(shares) == len(prefilling)
    if not (decodes or plan.chunks or tried):
        seat.overrule("no request would have advanced")
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
