"""Who advances in a step: the step policy says, and the kernel sees to it that everybody does in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vsched.kernel.generate.step_budget import StepPlan, StepTimeModel
from vsched.kernel.policy_calls import HOLD_MAX_NS, ask_step
from vsched.kernel.policy_seats import PolicySeat
from vsched.kernel.request import RequestState
from vsched.measured import Measured
from vsched.policy import PrefillView, StepPolicy, StepView


class StepSharing:
    """Asks the step policy of a generate group."""

    def __init__(self, seat: PolicySeat[StepPolicy], times: StepTimeModel) -> None:
        self._seat = seat
        self._times = times

    def shares(
        self,
        prefilling: Sequence[RequestState],
        plan: StepPlan,
        now_ns: int,
        *,
        decodes: int,
        waiting: int,
        measured: Measured,
    ) -> Iterator[tuple[RequestState, int | None]]:
        """Yield who advances in a step, with the most tokens of each; None for as many as fit.

        `prefilling` are in order of arrival. Who was left out for too long comes first. Where nobody decodes, and
        nothing came of the policy's answer, all follow: a share that ends short of an embedding must not keep those
        from going on that could.
        """
        token_ns, pair_ns = self._times.costs()
        view = StepView(
            now_ns=now_ns,
            prefilling=tuple([_view(state) for state in prefilling]),
            waiting=waiting,
            decodes=decodes,
            tokens_free=plan.budget.tokens,
            time_ns=plan.budget.time_ns,
            decode_ns=self._times.decode_ns(decodes) if decodes else 0.0,
            token_ns=token_ns,
            pair_ns=pair_ns,
            measured=measured,
            state=self._seat.state,
        )
        answer = ask_step(self._seat, view)
        late_ns = now_ns - HOLD_MAX_NS
        late = [
            index
            for index, state in enumerate(prefilling)
            if state.advanced_ns <= late_ns and state.admitted_ns <= late_ns
        ]
        if answer.time_ns is not None and not late:
            plan.budget.limit_time(answer.time_ns)
        shares: dict[int, int | None] = dict.fromkeys(answer.order)
        if answer.tokens is not None:
            shares = {
                index: most for index, most in zip(shares, answer.tokens, strict=True) if most
            }
        for index in late:
            if index not in shares:
                yield prefilling[index], None
        for index, most in shares.items():
            yield prefilling[index], most
        tried = answer.tokens is None and len(shares) == len(prefilling)
        if not (decodes or plan.chunks or tried):
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
    )
