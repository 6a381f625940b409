"""Small schedulers and requests for tests of one behaviour."""

from __future__ import annotations

import inspect
from typing import Any, cast

import msgspec

from vsched.kernel import SchedulerLimits
from vsched.kernel.request import RequestState, int32
from vsched.policy import (
    DECISIONS,
    Admission,
    AdmissionView,
    Admit,
    ArrivalDecision,
    ArrivalView,
    Hold,
    Policy,
    Redirect,
    RequestPolicy,
    Shed,
)
from vsched.sim.ranks.stepped import correct_outputs
from vsched.testing import ModelCluster, default_policies, make_request
from vsched.testing.cluster import SEATS
from vsched.types import Request

ROOMY = SchedulerLimits(
    block_size=4,
    blocks=1000,
    slots=4,
    batch_tokens=2000,
    chunk_tokens=1000,
    context_tokens=2000,
    page_rows=4,
    pages=500,
    encode_items=8,
    waiting=100,
)
"""Ample for everything; tests reduce the limits they are about."""


def make_limits(**changes: Any) -> SchedulerLimits:
    return msgspec.structs.replace(ROOMY, **changes)


def make_cluster(*requests: Request, **changes: Any) -> ModelCluster:
    """Return a cluster with ample limits and default policies, changed by name, that got these requests."""
    policies = {name: changes.pop(name) for name in SEATS if name in changes}
    cluster = ModelCluster(make_limits(**changes), default_policies(**policies))
    for request in requests:
        cluster.submit(request)
    return cluster


def complete(cluster: ModelCluster, *requests: Request) -> None:
    """Submit requests, each when the one before has ended."""
    for request in requests:
        cluster.submit(request)
        cluster.drain()


def words(count: int, *, start: int = 10) -> list[int]:
    """Return a text of `count` tokens; another `start` gives another text."""
    return [start + index for index in range(count)]


def image_request(name: str, *images: tuple[bytes, int], **changes: Any) -> Request:
    """Return a request of images (key, tokens) and one word after the last."""
    return make_request(name, [7], [(0, tokens, key) for key, tokens in images], **changes)


def request_state(request: Request, number: int) -> RequestState:
    return RequestState(
        request=request,
        number=number,
        order=(number, 0),
        stop_token_ids=(),
        tokens=int32(request.prompt_token_ids),
        host_bytes=0,
        submitted_ns=0,
        uncached=len(request.prompt_token_ids),
    )


class Gathering(RequestPolicy, frozen=True, kw_only=True):
    """Holds entries until `count` of them wait, for at most `deadline_s`."""

    count: int = 8
    deadline_s: float = 0.1

    def admit(self, view: AdmissionView) -> Admission:
        due_ns = min(entry.arrived_ns for entry in view.waiting) + int(self.deadline_s * 1e9)
        if view.now_ns < due_ns and len(view.waiting) < self.count:
            return Admission(hold_until_ns=due_ns)
        return Admission(range(min(len(view.waiting), self.count)))


class ByTenant(RequestPolicy, frozen=True, kw_only=True):
    """Decides about arrivals by the name of the tenant; a held request is admitted after some holds."""

    holds: int = 1
    hold_ns: int = 1_000_000

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        match view.request.tenant:
            case "shed":
                return Shed(f"{view.waiting} wait, {view.tenant_requests} of yours", 7, 503)
            case "elsewhere":
                return Redirect("http://other:8000/")
            case "held" if view.request.asks < self.holds:
                return Hold(view.now_ns + self.hold_ns)
            case "broken":
                raise RuntimeError("a bug in the policy")
            case _:
                return Admit()


def answering(decision: str, answer: Any, views: list[Any] | None = None) -> Policy:
    """Return a policy with one answer, error, or function of the view, for every call; its views go to `views`."""
    one = DECISIONS[decision]

    def method(*arguments: Any) -> Any:
        if views is not None:
            views.append(arguments[-1])
        if isinstance(answer, BaseException):
            raise answer
        return answer(arguments[-1]) if inspect.isfunction(answer) else answer

    names = {one.method: method}
    made = msgspec.defstruct("Answering", [], bases=(one.base,), namespace=names, frozen=True)
    return cast("Policy", made())


def encode_statistics(cluster: ModelCluster) -> dict[str, int]:
    statistics = cluster.kernel.statistics()["encode"]
    assert isinstance(statistics, dict)
    return statistics


def generate_statistics(cluster: ModelCluster) -> dict[str, int]:
    """Counters of the generate stage, over all its groups."""
    statistics = cluster.kernel.statistics()["generate"]
    return {name: value for name, value in statistics.items() if name != "groups"}


def prefilled(cluster: ModelCluster) -> int:
    return generate_statistics(cluster)["tokens_prefilled"]


def outcome(cluster: ModelCluster) -> list[object]:
    names = ("decisions", "encoded", "outputs", "ended", "refused", "rejected", "drained")
    return [getattr(cluster, name) for name in names]


def tight(**changes: object) -> SchedulerLimits:
    """Limits under which four requests start and not all can grow."""
    return make_limits(**{"blocks": 14, "slots": 4, "prefix_cache": False, **changes})


def crash(cluster: ModelCluster, group: str = "generate") -> None:
    cluster.lose(group)
    cluster.restore_group(group)


def lose_while_running(cluster: ModelCluster, poison: str) -> int:
    """Run a cluster whose group is lost whenever it runs a given request; return the number of losses."""
    losses = 0
    for _ in range(500):
        if poison in cluster.ended:
            return losses
        number = next(number for number, name in cluster.names.items() if name == poison)
        sequences = cluster.generators["generate"].sequences
        if number in sequences and sequences[number].state.length:
            losses += 1
            crash(cluster)
        elif cluster.busy("generate"):
            cluster.run_generate()
    raise AssertionError("the poison was never found")


def joined(cluster: ModelCluster) -> list[str]:
    """Names of the requests that joined, in order; a preempted one is repeated."""
    return [cluster.names[join.number] for step in cluster.decisions for join in step.joined]


def submit_texts(
    cluster: ModelCluster, count: int, tokens: int, *, apart: int = 50, **more: Any
) -> list[str]:
    """Submit requests `r0`, `r1`, … of different texts of this length; return their names."""
    names = [f"r{index}" for index in range(count)]
    for index, name in enumerate(names):
        cluster.submit(make_request(name, words(tokens, start=apart * index), **more))
    return names


def assert_served(cluster: ModelCluster, *names: str) -> None:
    """Drain the cluster, and assert that requests ended at their length limit with the right outputs.

    If all requests have ended, assert that nothing is held, too.
    """
    cluster.drain()
    for name in names:
        assert cluster.ended[name].reason == "length", cluster.ended[name]
        assert cluster.outputs[name] == correct_outputs(cluster.requests[name])
    if not cluster.unserved():
        assert_holds_nothing(cluster)


def assert_holds_nothing(cluster: ModelCluster) -> None:
    """Assert that a scheduler without requests holds no block, slot, item or page, and sent right outputs."""
    cluster.check_settled()
    statistics = cluster.kernel.statistics()
    encode, generate = encode_statistics(cluster), generate_statistics(cluster)
    assert (statistics["running"], statistics["waiting"]) == (0, 0)
    assert (generate["blocks_held"], generate["preempted"]) == (0, 0)
    assert (generate["swap_blocks_held"], generate["swapped"]) == (0, 0)
    assert (encode["waiting_items"], encode["running_items"]) == (0, 0)
    unused = encode["pages_free"] + encode["pages_evictable"] + encode["pages_orphaned"]
    assert unused == encode["pages_total"]
