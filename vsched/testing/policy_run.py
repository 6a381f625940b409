"""Run a policy over a few given requests: the one line of set-up of a policy's unit test."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from vsched.errors import PolicyError
from vsched.kernel import SchedulerLimits
from vsched.kernel.commands import RequestTimes
from vsched.policy import Policy, decisions_of
from vsched.testing.cluster import ModelCluster, default_policies, make_request
from vsched.types import Request

SECOND_NS = 1_000_000_000
LIMITS = {"blocks": 1024, "slots": 4, "context_tokens": 8192, "pages": 256}


class RequestAt(msgspec.Struct, frozen=True, kw_only=True):
    """A request for `run_policy`.

    Attributes:
        at_s: Arrival time.
        name: Name in the results; by default its position in the call, from 1.
        text_tokens: Prompt tokens without the images; at least 1. No two requests share a prefix.
        images: Encoder output tokens of each image; images come first in the prompt.
        output_tokens: Number of tokens to generate.
    """

    at_s: float = 0.0
    name: str = ""
    text_tokens: int = 16
    images: tuple[int, ...] = ()
    output_tokens: int = 1
    priority: int = 0
    ttft_target_ms: int | None = None
    tenant: str = ""
    session: str = ""


class PolicyRun(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `run_policy`, by the names of the requests.

    Attributes:
        joined: Requests in the order in which they got a slot; a preempted one is listed again when it returns.
        times: Times of each request that ended, in order of their ends; `first_token_ns`, for example.
        rejected: Reasons for rejections by `arrive`; empty for a redirect.
        refused: Requests that the kernel did not accept.
        states: The policy's state at the end, at each seat, such as `generate.admission`.
        statistics: The kernel's counters, as in `/admin/statistics`.
    """

    joined: list[str]
    times: dict[str, RequestTimes]
    rejected: dict[str, str]
    refused: list[str]
    states: dict[str, Any]
    statistics: dict[str, Any]


def run_policy(
    policy: Policy, *requests: RequestAt, step_ms: float = 10.0, **limits: Any
) -> PolicyRun:
    """Serve requests in the kernel on a virtual clock, with a policy in every decision that it has a method for.

    Default policies make the other decisions. Ranks are simulated; the kernel's invariants are checked after every
    event.

    Args:
        policy: The policy.
        requests: The requests.
        step_ms: Duration of every encode and generate step.
        limits: Fields of `SchedulerLimits`, such as `slots` and `blocks`.

    Raises:
        PolicyError: When a call of the policy fails or returns an invalid answer, or two requests have one name.
    """
    cluster = ModelCluster(SchedulerLimits(**{**LIMITS, **limits}), default_policies(policy))
    named = [_request(number, one) for number, one in enumerate(requests, 1)]
    names = [one.request_id for one in named]
    if len({*names}) < len(names):
        raise PolicyError(f"requests have one name: {', '.join(names)}. Remedy: name each one")
    times_ns = [int(one.at_s * SECOND_NS) for one in requests]
    due = sorted(zip(times_ns, named, strict=True), key=lambda pair: pair[0])
    arrived = _serve(cluster, due, int(step_ms * 1e6))
    cluster.check_policies()
    cluster.check_settled()
    return PolicyRun(
        joined=[cluster.names[one.number] for step in cluster.decisions for one in step.joined],
        times={name: finish.times for name, finish in cluster.ended.items()},
        rejected={arrived[one.arrival_id - 1]: one.reason for one in cluster.rejected},
        refused=list(cluster.refused),
        states=_states(policy, cluster),
        statistics=cluster.kernel.statistics(),
    )


def _request(number: int, one: RequestAt) -> Request:
    name = one.name or str(number)
    # The first token of each text is different, so that no prefix is shared.
    text = [1000 + number, *range(10, 9 + one.text_tokens)]
    images = [(0, tokens, f"{name}/{index}".encode()) for index, tokens in enumerate(one.images)]
    request = make_request(
        name,
        text,
        images,
        max_tokens=one.output_tokens,
        priority=one.priority,
        ttft_target_ms=one.ttft_target_ms,
    )
    return msgspec.structs.replace(request, tenant=one.tenant, session=one.session)


def _serve(
    cluster: ModelCluster, requests: Sequence[tuple[int, Request]], step_ns: int
) -> list[str]:
    """Let requests arrive and run steps until nothing is left to do; return the names in order of arrival."""
    due, arrived = deque(requests), list[str]()

    def arrive(until_ns: int) -> None:
        while due and due[0][0] <= until_ns:
            at_ns, request = due.popleft()
            cluster.wait(max(at_ns - cluster.now_ns, 0))
            arrived.append(request.request_id)
            cluster.arrive(request)

    while True:
        busy = [*cluster.busy("encode"), *cluster.busy("generate")]
        if busy:
            ends_ns = cluster.now_ns + step_ns
            arrive(ends_ns)
            cluster.wait(max(ends_ns - cluster.now_ns, 0))
            for group in busy:
                run = cluster.run_encode if group in cluster.encode_logs else cluster.run_generate
                run(group)
        elif due and (not cluster.timers or due[0][0] <= cluster.timers[0]):
            arrive(due[0][0])
        elif cluster.timers:
            cluster.wait(max(cluster.timers[0] - cluster.now_ns, 0))
        else:
            return arrived


def _states(policy: Policy, cluster: ModelCluster) -> dict[str, Any]:
    state_type, made = policy.state_type, decisions_of(type(policy))
    return {
        seat: msgspec.msgpack.decode(data, type=state_type)
        for seat, data in cluster.kernel.policy_states().items()
        if state_type is not None and seat.rpartition(".")[2] in made
    }
