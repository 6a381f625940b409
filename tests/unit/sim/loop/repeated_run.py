"""Print the digest of a run with every feature of a virtual loop and a network, in a process of its own."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from hashlib import blake2b

from tests.unit.sim.virtual import current, play
from vsched.sim.faults.injection import Injector
from vsched.sim.faults.plan import random_plan
from vsched.sim.network.channel import LinkProfile
from vsched.sim.network.links import Network
from vsched.wire import Pulse, encode_report

DIGEST = blake2b(digest_size=16)
GROUPS = ["encode-0", "generate-0"]
PROFILE = LinkProfile(
    jitter_ns=100_000, loss=0.1, delay=0.1, duplication=0.1, reordering=0.1, corruption=0.1
)


def note(*words: object) -> None:
    DIGEST.update(f"{current().now_ns()} {words}\n".encode())


async def talk(seed: int) -> None:
    """Frames in both directions between a leader and two ranks of each group, with faults."""
    rng = random.Random(seed)
    plan = random_plan(rng, GROUPS, 2 * 10**9, ranks=2)
    DIGEST.update(plan.to_json().encode())
    network = Network(current(), rng, Injector(plan, current()), profile=PROFILE)
    for group in GROUPS:
        leader = network.listen(f"ipc://{group}", lambda *received: note("heard", *received))
        ends = [network.connect(f"ipc://{group}", rank) for rank in range(2)]
        for index in range(50):
            for rank, end in enumerate(ends):
                leader.send(rank, bytes([index]) * 40)
                end.send(encode_report(Pulse()))
            await asyncio.sleep(0.03)
        for end in ends:
            while (frame := await end.next_frame(0.1)) is not None:
                note("took", end.identity, frame)
    note(network.statistics())


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


async def main(seed: int) -> None:
    async with asyncio.TaskGroup() as group:
        for part in (talk(seed), abort_a_group(), use_threads()):
            group.create_task(part)
    note(current().statistics())


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        play(main(number), tie_seed=number)
    print(DIGEST.hexdigest(), hash("a string"))
