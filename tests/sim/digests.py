"""Print digests of runs of every layer of the simulators; a process of its own for a test."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from hashlib import blake2b
from typing import get_args

from tests.unit.sim.shapes import COST, SCARCE, config, scarce
from tests.unit.sim.virtual import current, play
from vsched.sim.cluster import draw_scenario, run_scenario
from vsched.sim.fast.groups import GroupOutage
from vsched.sim.fast.simulation import simulate
from vsched.sim.faults import Effect, Injector, MessageFault, random_plan
from vsched.sim.network.links import LinkProfile, Network
from vsched.wire import Pulse, encode_report

DIGEST = blake2b(digest_size=16)
GROUPS = ["encode-0", "generate-0"]
EFFECTS = tuple(
    MessageFault(duration_ns=10**10, group=group, rank=rank, effect=effect, rate=0.1)
    for group in GROUPS
    for rank in range(2)
    for effect in get_args(Effect)
)


def note(*words: object) -> None:
    DIGEST.update(f"{current().now_ns()} {words}\n".encode())


async def talk(seed: int) -> None:
    """Frames in both directions between a leader and two ranks of each group, with faults."""
    rng = random.Random(seed)
    plan = random_plan(rng, GROUPS, 2 * 10**9, ranks=2).with_more(EFFECTS)
    DIGEST.update(plan.to_json().encode())
    profile = LinkProfile(jitter_ns=100_000)
    network = Network(current(), rng, Injector(plan, current()), profile=profile)
    for group in GROUPS:
        leader = network.listen(f"ipc://{group}-1", lambda *received: note("heard", *received))
        ends = [network.connect(f"ipc://{group}-1", rank) for rank in range(2)]
        for index in range(50):
            for rank, end in enumerate(ends):
                leader.send(rank, bytes([index]) * 40)
                end.send(encode_report(Pulse()))
            await asyncio.sleep(0.03)
        for end in ends:
            while (frame := await end.next_frame(0.1)) is not None:
                note("took", end.identity, frame)


async def abort_a_group() -> None:
    """A task group cancels its tasks in the order of a set."""

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            note("cancelled", name)
            raise

    try:
        async with asyncio.TaskGroup() as group:
            for index in range(20):
                group.create_task(wait(f"task {index}"))
                junk.append(bytearray(random.SystemRandom().randrange(1, 5000)))
            await asyncio.sleep(0.1)
            raise ValueError("over")
    except* ValueError:
        note("over")


junk: list[bytearray] = []


async def use_threads() -> None:
    async def call(index: int) -> None:
        took_s = random.SystemRandom().random() * 0.005
        await asyncio.to_thread(time.sleep, took_s)
        note("thread", index)

    await asyncio.gather(*(call(index) for index in range(4)), asyncio.sleep(0.001))


async def use_the_loop(seed: int) -> None:
    """Ties, threads of any speed, a cancelled group, a network with every fault."""
    async with asyncio.TaskGroup() as group:
        for part in (talk(seed), abort_a_group(), use_threads()):
            group.create_task(part)


def simulate_quickly() -> str:
    """Return the digest of a run of the fast simulator in which a group is lost."""
    lost = GroupOutage(group="generate-0", at_ns=30_000_000, duration_ns=20_000_000)
    settings = config(*SCARCE, "generate.replicas=2", "encode.encoding.look_ahead_chunks=100")
    return simulate(settings, scarce(4), cost=COST, outages=[lost]).digest


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for number in range(4):
        play(use_the_loop(number), tie_seed=number)
    print(DIGEST.hexdigest())
    print(simulate_quickly())
    for seed in range(int(sys.argv[1])):
        print(run_scenario(draw_scenario(seed)).digest)
    print(hash("a string"))
