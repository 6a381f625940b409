"""Deficit round robin in prefill between tenants or sessions."""

from __future__ import annotations

from typing import Literal

import msgspec

from vsched.policy import PositiveCount, RequestPolicy, StepShares, StepView


class Deficits(msgspec.Struct):
    """Tokens that each tenant or session may still prefill in its turn, and the next one in turn."""

    tokens: dict[str, int] = {}
    turn: str = ""


class FairPrefill(RequestPolicy, frozen=True, kw_only=True):
    """Shares the tokens of a step between tenants by deficit round robin; within a tenant, in order of arrival.

    Each round gives every tenant `quantum_tokens`; unused ones are kept for its next turn, so that
    a tenant with long prompts leaves tokens of each step to others. A request without a tenant
    counts as a separate tenant. With `by = "session"`, the turns are taken by the conversations of
    all tenants.

    Source: Shreedhar and Varghese, Efficient Fair Queuing Using Deficit Round Robin, SIGCOMM 1995.

    Attributes:
        by: Unit that takes turns.
        quantum_tokens: Tokens per tenant and round; a lower number is fairer, and cuts prompts into
            more chunks.
    """

    state_type = Deficits
    by: Literal["tenant", "session"] = "tenant"
    quantum_tokens: PositiveCount = 256

    def share(self, view: StepView) -> StepShares:
        """Return requests in the order of the rounds, each with its maximum number of tokens."""
        state: Deficits = view.state
        queues: dict[str, list[int]] = {}
        for index, request in enumerate(view.prefilling):
            whose = request.tenant
            if self.by == "session":
                whose = f"{request.tenant}\0{request.session}" if request.session else ""
            queues.setdefault(whose or f"\0{request.arrived_ns}", []).append(index)
        names = list(queues)
        if state.turn in names:
            first = names.index(state.turn)
            names = names[first:] + names[:first]
        left = [request.tokens for request in view.prefilling]
        deficits = {name: state.tokens.get(name, 0) for name in names}
        room, given = self._room(view), dict.fromkeys(range(len(left)), 0)
        order: dict[int, None] = {}
        while room > 0 and any(left[index] for queue in queues.values() for index in queue):
            for name in names:
                deficits[name] += self.quantum_tokens
                for index in queues[name]:
                    tokens = min(left[index], deficits[name], room)
                    if tokens:
                        order[index] = None
                        given[index] += tokens
                        left[index] -= tokens
                        deficits[name] -= tokens
                        room -= tokens
                if not any(left[index] for index in queues[name]):
                    deficits[name] = 0
                if room <= 0:
                    state.turn = names[(names.index(name) + 1) % len(names)]
                    break
        state.tokens = {name: tokens for name, tokens in deficits.items() if tokens}
        return StepShares(list(order), [given[index] for index in order])

    def _room(self, view: StepView) -> int:
        """Return the tokens to share: the free ones, limited to about what fits in the time."""
        slowest_ns = view.token_ns + view.pair_ns * max(
            (one.computed for one in view.prefilling), default=0
        )
        if view.time_ns is None or not slowest_ns:
            return view.tokens_free
        return min(view.tokens_free, max(int(view.time_ns / slowest_ns), self.quantum_tokens))
