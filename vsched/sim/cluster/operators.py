"""Operator actions on a simulated engine over HTTP: on groups, adapters and policies; clear, read status."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from vsched.config.section import PolicyTable
from vsched.sim.network.asgi_client import AsgiClient
from vsched.sim.world import World

Action = Literal["drain", "restart", "resume", "clear", "look", "load", "unload", "replace"]
LOOKS = ("/health", "/metrics", "/admin/statistics", "/admin/replicas", "/v1/models")
UNDERSTOOD = (200, 409, 503)
"""Expected statuses: done, not possible now, not served any more."""
EXTRA = "extra"
"""The adapter that operators load and unload; no request names it."""
POLICIES = {
    "generate.admission": ("fifo", "priority", "tenant-fair", "shortest-first"),
    "generate.step": ("in-order", "slo-feedback", "tenant-fair"),
    "generate.preemption": ("youngest", "cheapest"),
    "generate.eviction": ("lru", "s3-fifo", "none"),
    "generate.insertion": ("everything", "matching"),
    "encode.eviction": ("lru", "s3-fifo", "none"),
    "routing": ("least-loaded", "round-robin", "image-affinity"),
}
"""Policies that operators install while requests run, by the paths of their tables."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An operator action; `group` is set for actions on a group, `policies` for `replace`."""

    at_ns: int
    action: Action
    group: str = ""
    policies: dict[str, PolicyTable] = {}


def draw_operations(
    rng: random.Random, groups: Sequence[str], span_ns: int
) -> tuple[Operation, ...]:
    """Draw the operator actions of a scenario; most have none."""
    if rng.random() < 0.7:
        return ()
    actions: list[Action] = ["drain", "drain", "restart", "resume", "resume", "clear", "look"]
    drawn = [
        Operation(
            at_ns=rng.randrange(span_ns), action=rng.choice(actions), group=rng.choice(groups)
        )
        for _ in range(rng.randint(1, 5))
    ]
    return tuple(sorted(drawn, key=lambda operation: operation.at_ns))


def draw_adapter_changes(rng: random.Random, span_ns: int) -> tuple[Operation, ...]:
    """Draw the times at which operators load and unload an adapter."""
    actions: list[Action] = ["load", "unload"]
    times = sorted(rng.randrange(span_ns) for _ in range(rng.randint(1, 6)))
    return tuple(Operation(at_ns=at_ns, action=actions[n % 2]) for n, at_ns in enumerate(times))


def draw_replacements(rng: random.Random, span_ns: int) -> tuple[Operation, ...]:
    """Draw the times at which operators replace policies, one or several at once."""
    drawn = []
    for _ in range(rng.randint(1, 5)):
        paths = rng.sample(list(POLICIES), rng.randint(1, 3))
        policies: dict[str, PolicyTable] = {
            path: {"use": rng.choice(POLICIES[path])} for path in paths
        }
        drawn.append(Operation(at_ns=rng.randrange(span_ns), action="replace", policies=policies))
    return tuple(drawn)


async def operate(world: World, client: AsgiClient, operation: Operation) -> None:
    """Perform an action now, and check the response."""
    calls: list[tuple[str, str, Any]]
    if operation.action == "look":
        calls = [("GET", path, None) for path in LOOKS]
    elif operation.action == "clear":
        calls = [("POST", "/admin/clear", {})]
    elif operation.action == "load":
        calls = [("POST", "/admin/adapters", {"name": EXTRA, "path": EXTRA})]
    elif operation.action == "unload":
        calls = [("DELETE", f"/admin/adapters/{EXTRA}", None)]
    elif operation.action == "replace":
        calls = [("POST", "/admin/policies", operation.policies)]
    else:
        body = {"group": operation.group, "action": operation.action}
        calls = [("POST", "/admin/replicas", body)]
    for method, path, requested in calls:
        response = await client.request(method, path, json=requested)
        world.expect(
            response.status in UNDERSTOOD or (method, response.status) == ("DELETE", 404),
            f"{method} {path} {requested} was answered with {response.status}: {response.body!r}",
        )
