"""Contract suite for hosts of policies: no request or block is lost, and failing policies change nothing.

A host is a scheduler that calls policies through `vsched.policy_host`, such as that of
`vsched.integrations.vllm`. The suite drives it with random loads and policies that shuffle, starve, raise and return
nonsense.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from vsched.errors import PolicyError
from vsched.policy import (
    Admission,
    AdmissionView,
    Policy,
    PreemptionView,
    RequestPolicy,
    StepShares,
    StepView,
)
from vsched.policy_host import HostCapabilities, check_capabilities
from vsched.testing.contracts.base import demand

BLOCK_TOKENS = 16
TABLES = ("generate.admission", "generate.step", "generate.preemption")


class HostLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A request: its prompt, and the number of tokens that it must get; its client may leave after some steps."""

    request_id: str
    prompt: tuple[int, ...]
    outputs: int
    tenant: str = ""
    priority: int = 0
    leaves_after: int | None = None


class HostRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a load.

    Attributes:
        outputs: Number of tokens by request, also of those whose clients left.
        steps: Tokens of each step by request.
        blocks_held: Blocks that are neither free nor cached at the end.
        requests_left: Requests that the host still knows at the end.
        policy_faults: Number of failed policy calls.
        calls: Number of policy calls by table.
    """

    outputs: Mapping[str, int]
    steps: Sequence[Mapping[str, int]]
    blocks_held: int = 0
    requests_left: int = 0
    policy_faults: int = 0
    calls: Mapping[str, int] = {}


RunHost = Callable[[Mapping[str, Policy] | None, Sequence[HostLoad]], HostRun]
"""Runs a load on a fresh host with about 100 blocks of 16 tokens, 8 slots and 256 tokens per step, and with these
policies by table; with None, without any code of policies."""


class Calls(msgspec.Struct):
    """Number of calls, and a seed."""

    count: int = 0


class Shuffles(RequestPolicy, frozen=True, kw_only=True):
    """Each order is another one, each limit too; the victim is any that is eligible."""

    state_type = Calls
    seed: int = 0

    def _rng(self, state: Calls) -> random.Random:
        state.count += 1
        return random.Random(f"{self.seed} {state.count}")  # noqa: S311

    def admit(self, view: AdmissionView) -> Admission:
        """Admit some requests in any order, at least one."""
        rng = self._rng(view.state)
        order = rng.sample(range(len(view.waiting)), len(view.waiting))
        return Admission(order[: rng.randint(1, len(order))])

    def share(self, view: StepView) -> StepShares:
        """Prefill some requests in any order, each by any number of tokens."""
        rng = self._rng(view.state)
        order = rng.sample(range(len(view.prefilling)), rng.randint(0, len(view.prefilling)))
        return StepShares(order, [rng.randint(0, 90) for _ in order])

    def victim(self, view: PreemptionView) -> int:
        """Preempt any request."""
        return self._rng(view.state).choice(view.eligible)


class Fails(RequestPolicy, frozen=True, kw_only=True):
    """Raises, or returns an invalid value, and changes its state before."""

    state_type = Calls

    def admit(self, view: AdmissionView) -> Admission:
        """Raise, or name a request twice."""
        view.state.count += 1
        if view.now_ns % 2:
            raise RuntimeError("a bug")
        return Admission([0, 0])

    def share(self, view: StepView) -> StepShares:
        """Name a request that is not there."""
        return StepShares([len(view.prefilling)])

    def victim(self, view: PreemptionView) -> int:
        """Exit the process."""
        raise SystemExit(3)


class NeedsAll(RequestPolicy, frozen=True, kw_only=True):
    """Needs a feature."""

    feature: str = ""

    def needs(self) -> Sequence[str]:
        """Return the feature."""
        return (self.feature,)

    def admit(self, view: AdmissionView) -> Admission:
        """Admit the first request."""
        return Admission([0])


def random_load(seed: int, count: int = 40, *, leaving: float = 0.0) -> list[HostLoad]:
    """Return requests of two tenants: long and short prompts, some with a common beginning."""
    rng = random.Random(seed)  # noqa: S311
    shared = [rng.randrange(10, 4000) for _ in range(4 * BLOCK_TOKENS)]
    found = []
    for index in range(count):
        long = rng.random() < 0.3
        own = rng.randrange(200, 600) if long else rng.randrange(5, 60)
        common = shared[: BLOCK_TOKENS * rng.randrange(5)]
        found.append(
            HostLoad(
                request_id=f"r{index}",
                prompt=(*common, *(rng.randrange(10, 4000) for _ in range(own))),
                outputs=rng.randrange(1, 200),
                tenant="heavy" if long else "light",
                priority=rng.randrange(3),
                leaves_after=rng.randrange(40) if rng.random() < leaving else None,
            )
        )
    return found


def check_host(
    run: RunHost, able: HostCapabilities, *, seeds: Sequence[int] = (0, 1)
) -> dict[str, int]:
    """Check a host; return the number of policy calls by table, and of failures as `faults`.

    Raises:
        ContractBroken: Names the requirement that the host does not meet.
    """
    tables = [table for table in TABLES if table in able.tables]
    demand(tables, f"the host has a seat for one of {', '.join(TABLES)}")
    figures = dict.fromkeys((*tables, "faults"), 0)
    for seed in seeds:
        load = random_load(seed)
        stock = run(None, load)
        check_run(stock, load, "without policies")
        idle = run({}, load)
        demand(idle.steps == stock.steps, "without policies, each step is that of the host alone")
        failing = run(dict.fromkeys(tables, Fails()), load)
        check_run(failing, load, "with failing policies")
        demand(failing.steps == stock.steps, "with failing policies, each step is that of the host")
        demand(failing.policy_faults, "failures of policies are counted")
        figures["faults"] += failing.policy_faults
        for leaving in (0.0, 0.3):
            load = random_load(seed, leaving=leaving)
            shuffled = run(dict.fromkeys(tables, Shuffles(seed=seed)), load)
            check_run(
                shuffled, load, f"with shuffling policies, and {leaving:.0%} clients that leave"
            )
            demand(not shuffled.policy_faults, "valid answers are no failures")
            for table in tables:
                figures[table] += shuffled.calls.get(table, 0)
    unused = [table for table in tables if not figures[table]]
    demand(not unused, f"the policies of {', '.join(unused)} are called")
    check_refusals(able)
    return figures


def check_run(run: HostRun, load: Sequence[HostLoad], when: str) -> None:
    """Check that each request got its tokens, and that nothing is left.

    Raises:
        ContractBroken: If not.
    """
    for one in load:
        got = run.outputs.get(one.request_id, 0)
        right = got == one.outputs or (one.leaves_after is not None and got < one.outputs)
        demand(right, f"{when}, {one.request_id} gets {one.outputs} tokens, not {got}")
    demand(not run.requests_left, f"{when}, no request is left, but {run.requests_left} are")
    demand(not run.blocks_held, f"{when}, all blocks come back, but {run.blocks_held} are held")


def check_refusals(able: HostCapabilities) -> None:
    """Check that a policy is refused that needs a feature which the host lacks.

    Raises:
        ContractBroken: If not.
    """
    table = next(iter(sorted(able.tables)))
    for feature in ("hold", "time", "swap", "encode"):
        try:
            check_capabilities(NeedsAll(feature=feature), table, able)
        except PolicyError as error:
            demand(feature not in able.features, f"a policy that needs {feature} is taken")
            demand(feature in str(error), f"the refusal names {feature}")
        else:
            demand(feature in able.features, f"a policy that needs {feature} is refused")
