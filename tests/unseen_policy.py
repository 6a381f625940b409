"""A policy outside vsched, with one configuration and one load, for the simulator, our engine and vLLM.

`tests/e2e/test_unseen_policy.py` runs it in the simulator and in our engine, and
`tests/vllm/test_unseen_policy.py` in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from vsched.policy import (
    Admission,
    AdmissionView,
    PreemptionView,
    RequestPolicy,
    StepShares,
    StepView,
)

BLOCK_TOKENS = 32
"""The minimum of vLLM on a CPU."""
KV_TOKENS = 480
STEP_TOKENS = 64
FIFO = '[generate.admission]\nuse = "vsched_policies.admission:Fifo"\n'
TURNS = '[policy]\nuse = "tests.unseen_policy:Turns"\ngather = 14\nstep_tokens = 24\n'
SEATS = {"generate.admission", "generate.step", "generate.preemption"}
HOLD_NS = 30_000_000_000
"""Half of the maximum that a host allows (`policies.passed_over_max_s`)."""


class Last(msgspec.Struct):
    """The tenant that was chosen first in the last call, empty before that."""

    tenant: str = ""


class Turns(RequestPolicy, frozen=True, kw_only=True):
    """Admits tenants in turns once `gather` requests wait, shortest prompts first; limits chunks to `step_tokens`."""

    state_type = Last

    gather: int
    step_tokens: int

    def admit(self, view: AdmissionView) -> Admission:
        """Admit the shortest request of each tenant, then the second shortest; the last tenant comes last."""
        if not view.state.tenant and len(view.waiting) < self.gather:
            return Admission(hold_until_ns=view.now_ns + HOLD_NS)
        counts: dict[str, int] = {}
        ranks = []
        for _, index in sorted((one.tokens or 0, i) for i, one in enumerate(view.waiting)):
            tenant = view.waiting[index].tenant
            counts[tenant] = counts.get(tenant, 0) + 1
            ranks.append((counts[tenant], tenant == view.state.tenant, tenant, index))
        order = [index for *_, index in sorted(ranks)]
        view.state.tenant = view.waiting[order[0]].tenant
        return Admission(order)

    def share(self, view: StepView) -> StepShares:
        """Prefill the shortest first, in small chunks."""
        order = sorted(range(len(view.prefilling)), key=lambda i: view.prefilling[i].tokens)
        return StepShares(order, [self.step_tokens] * len(order))

    def victim(self, view: PreemptionView) -> int:
        """Preempt the request with the most tokens."""
        return max(view.eligible, key=lambda index: view.running[index].tokens)


class Ask(msgspec.Struct, frozen=True):
    """A request of a tenant."""

    name: str
    tenant: str
    prompt: int
    outputs: int = 30


LOAD = [
    *[Ask(f"bulk{number}", "bulk", 150 + 7 * (number * 3 % 7)) for number in range(7)],
    *[Ask(f"chat{number}", "chat", 40 - 3 * number) for number in range(7)],
]
ALONE = [
    name
    for bulk, chat in zip((0, 5, 3, 1, 6, 4, 2), (6, 5, 4, 3, 2, 1, 0), strict=True)
    for name in (f"bulk{bulk}", f"chat{chat}")
]
"""The order of `Turns` with one slot, the same in all three places."""


def prompt_of(number: int, tokens: int) -> list[int]:
    """Return the prompt of a request: no two share a block."""
    return [10 + (7 * number + 3 * place + 1) % 90 for place in range(tokens)]


def write_tables(folder: Path, policies: str, slots: int) -> Path:
    """Write the configuration file that each place reads."""
    path = folder / f"{'turns' if policies == TURNS else 'fifo'}-{slots}.toml"
    limits = {
        "slots": slots,
        "block_size": BLOCK_TOKENS,
        "chunk_tokens": STEP_TOKENS,
        "max_batch_tokens": STEP_TOKENS,
        "step_target_ms": 0,
    }
    lines = "".join(f"{key} = {value}\n" for key, value in limits.items())
    path.write_text(f"[generate]\n{lines}{policies}")
    return path


def mean_place(order: Sequence[str], tenant: str = "chat") -> float:
    """Return the mean place of a tenant's requests in the order of first tokens."""
    places = [place for place, name in enumerate(order) if name.startswith(tenant)]
    return sum(places) / len(places)


def check_orders(orders: Mapping[str, Sequence[str]]) -> None:
    """Check the orders of first tokens with the configurations of `configurations`."""
    for found in orders.values():
        assert sorted(found) == sorted(one.name for one in LOAD)
    assert list(orders["alone"]) == ALONE
    # The winner for the tenant with short prompts, by more than a place.
    assert mean_place(orders["turns"]) < mean_place(orders["fifo"]) - 1


def configurations(folder: Path) -> dict[str, Path]:
    """Write the configurations: fifo and the policy, and the policy with one slot."""
    cases = {"fifo": (FIFO, 4), "turns": (TURNS, 4), "alone": (TURNS, 1)}
    return {name: write_tables(folder, *case) for name, case in cases.items()}
