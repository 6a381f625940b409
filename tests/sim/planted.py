"""Known defects, planted one at a time by changing a line of production code into a likely mistake."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Plant(NamedTuple):
    """A defect: in this function (`module:Class.method`), `right` is changed to `wrong`.

    `seed` is the first that finds it: a scenario of the swarm for those of `PLANTS`. With `twice`, it shows as a
    difference between two runs.
    """

    name: str
    place: str
    right: str
    wrong: str
    seed: int = 0
    twice: bool = False


PLANTS = (
    Plant(
        "put at the tail",
        "vsched.kernel.request_moves:RequestMoves.requeue",
        "commands = list(",
        "self._table.arrivals += 1; state.order = (self._table.arrivals, 0); commands = list(",
        seed=35,
    ),
    Plant(
        "an early counter commit",
        "vsched.kernel.generate.group:GenerateGroup.remove",
        "computed = len(state.tokens) - 1",
        "computed = len(state.tokens)",
        seed=14,
    ),
    Plant(
        "a permit leak",
        "vsched.media.fills:Fills._end_fill",
        "fill.give_back()",
        "fill.lease.release() if outcome else fill.give_back()",
        seed=22,
    ),
    Plant(
        "a set in the batch order",
        "vsched.kernel.encode.stage:EncodeStage._take_batch",
        "for entry in chosen:",
        "for entry in set(chosen):",
        seed=8,
        twice=True,
    ),
    Plant(
        "a missed slot field",
        "vsched.worker.generate_rank:SlotTable.reset",
        "self.stop_tokens[slot] = -1",
        "self.tokens[slot] = -1",
        seed=1,
    ),
    Plant(
        "a heartbeat with two deadlines",
        "vsched.aio.leader:FailureDetector.failure",
        "silent_s = limits.rank_timeout_s + limits.heartbeat_s",
        "silent_s = limits.heartbeat_s",
        seed=3,
    ),
    Plant(
        "a cache view pinning its buffer",
        "vsched.worker.sizing:KvBuilder._tear_down",
        "worker.drop_kv()",
        "pass",
        seed=4,
    ),
    Plant(
        "an eviction that ignores pins",
        "vsched.kernel.encode.embedding_cache:EmbeddingCache._preemptible",
        "and not other.pins",
        "",
        seed=7,
    ),
    Plant(
        "a retry by one rank",
        "vsched.worker.stage_rank:EncodeRank._run_layers",
        "except DeviceOutOfMemory as error:",
        "except DeviceOutOfMemory as error:\n        if not self._first:\n"
        "            return self._run_layers(step, 0, work)",
        seed=70,
    ),
    Plant(
        "a part of a batch taken for all of it",
        "vsched.worker.stage_rank:EncodeRank._run_layers",
        "if done:",
        "if True:",
        seed=17,
    ),
    Plant(
        "a lost terminal reply",
        "vsched.aio.streams:StreamTable.deliver_finish",
        "stream.push_finish(finish)",
        "stream.push_finish(finish) if self._by_number else None",
        seed=0,
    ),
    Plant(
        "a broken connection that nobody looks at",
        "vsched.aio.hosts.remote:RemoteHost._connect",
        "connect(self.stream.receive, self.stream.fail)",
        "connect(self.stream.receive, lambda why: None)",
        seed=98,
    ),
)


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Have a defect within the context."""
    path, _, name = plant.place.partition(":")
    module = importlib.import_module(path)
    holder_name, _, method = name.partition(".")
    holder = getattr(module, holder_name)
    right = vars(holder)[method]
    source = textwrap.dedent(inspect.getsource(getattr(right, "fget", right)))
    assert source.count(plant.right) == 1, f"{plant.place} has changed: plant the defect again"
    scope: dict[str, object] = {}
    code = "from __future__ import annotations\n" + source.replace(plant.right, plant.wrong)
    exec(compile(code, f"<{plant.name}>", "exec"), vars(sys.modules[path]), scope)
    setattr(holder, method, scope[method])
    try:
        yield
    finally:
        setattr(holder, method, right)
