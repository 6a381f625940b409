"""The contract suite of hosts: vsched's own kernel meets it, and a host that breaks it is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from vsched.kernel import SchedulerLimits
from vsched.policy import POLICY_TABLES, Policy
from vsched.policy_host import HostCapabilities, SeatPolicies
from vsched.testing import ModelCluster, make_request
from vsched.testing.cluster import default_policies
from vsched.testing.contracts.base import ContractBroken
from vsched.testing.contracts.host import HostLoad, HostRun, check_host

LIMITS = SchedulerLimits(blocks=110, slots=8, batch_tokens=256, context_tokens=1024, pages=16)
ABLE = HostCapabilities(host="vsched", tables=frozenset(POLICY_TABLES))


def run_kernel(policies: Mapping[str, Policy] | None, load: Sequence[HostLoad]) -> HostRun:
    """Run a load on the kernel."""
    usual = default_policies()
    chosen = SeatPolicies(by_table={**usual.by_table, **(policies or {})})
    cluster, calls, left = ModelCluster(LIMITS, chosen), dict[str, int](), dict[str, int]()

    def counted(seat: str, ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(view: Any) -> Any:
            table = f"generate.{seat.rpartition('.')[2]}"
            calls[table] = calls.get(table, 0) + seat.startswith("generate")
            return ask(view)

        return call

    cluster.kernel.watch_policies(counted)
    for one in load:
        cluster.submit(make_request(one.request_id, list(one.prompt), max_tokens=one.outputs))
        if one.leaves_after is not None:
            left[one.request_id] = one.leaves_after
        for _ in range(2):
            if cluster.busy("generate"):
                cluster.run_generate()
        for name, steps in [*left.items()]:
            left[name] = steps - 1
            if steps <= 0 and name not in cluster.ended:
                cluster.abort(name)
                del left[name]
    cluster.drain()
    statistics = cluster.kernel.statistics()
    return HostRun(
        outputs={name: len(tokens) for name, tokens in cluster.outputs.items()},
        steps=[{msgspec.json.encode(one).decode(): 1} for one in cluster.decisions],
        blocks_held=cluster.kernel.generators[0].statistics()["blocks_held"],
        requests_left=len(cluster.kernel.requests),
        policy_faults=sum(statistics["policy_faults"].values()),
        calls=calls,
    )


def test_kernel_meets_the_contract_of_hosts() -> None:
    figures = check_host(run_kernel, ABLE, seeds=[0])
    assert figures["faults"] > 20


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"requests_left": 1}, "no request is left"),
    ({"outputs": {}}, "r0 gets .* tokens, not 0"),
    ({"calls": {}}, "are called"),
]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"blocks_held": 3}, "without policies, all blocks come back, but 3 are held"),
        ({"policy_faults": 0}, "failures of policies are counted"),
        *(pytest.param(*row, marks=pytest.mark.thorough) for row in OTHERS),
    ],
)
def test_host_that_breaks_the_contract_is_found(changes: dict[str, Any], sentence: str) -> None:
    def short(policies: Mapping[str, Policy] | None, load: Sequence[HostLoad]) -> HostRun:
        run = run_kernel(policies, load[:12])
        outputs = {**{one.request_id: one.outputs for one in load[12:]}, **run.outputs}
        return msgspec.structs.replace(run, **{"outputs": outputs, **changes})

    with pytest.raises(ContractBroken, match=sentence):
        check_host(short, ABLE, seeds=[0])
