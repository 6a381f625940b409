"""Links between three simulated machines, each a process here, with a rate and byte counters.

Every machine has a link to all others, with a rate in each direction. A cable between two machines
uses both of their links. The cables run in a separate process, so that they do not delay the
measured event loops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Literal, Self

from tests.cable import Cable, Wire

Machine = Literal["engine", "encoder", "generator"]
MACHINES: tuple[Machine, ...] = ("engine", "encoder", "generator")
READY_S = 60.0
"""Start-up timeout of the process."""


class Links:
    """The cables from the engine to both other machines.

    Attributes:
        addresses: The engine's end of each cable, by the machine it leads to.
    """

    def __init__(self, encoder: str, generator: str) -> None:
        """Connect the cables to the addresses of two hosts."""
        context = get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_run, args=(there, encoder, generator), daemon=True)
        self._process.start()
        assert self._here.poll(READY_S), "the cable process did not start"
        self.addresses: Mapping[Machine, str] = self._here.recv()

    def shape(self, bytes_per_s: float, latency_s: float) -> None:
        """Set the rate of every link in each direction, 0 for unlimited, and the latency of every cable."""
        self._ask(("shape", bytes_per_s, latency_s))

    def carried(self) -> dict[str, int]:
        """Return the bytes over each link so far, by machine and direction."""
        found = self._ask(("carried",))
        assert isinstance(found, dict)
        return found

    def _ask(self, words: tuple[object, ...]) -> object:
        self._here.send(words)
        assert self._here.poll(READY_S), "the cable process does not respond"
        return self._here.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._here.close()
        self._process.join(READY_S)


def _run(requested: Connection, encoder: str, generator: str) -> None:
    asyncio.run(_serve(requested, encoder, generator))


async def _serve(requested: Connection, encoder: str, generator: str) -> None:
    """Run the cables until the other end of the pipe is closed."""
    up, down = ({machine: Wire() for machine in MACHINES} for _ in range(2))
    ends: Mapping[Machine, str] = {"encoder": encoder, "generator": generator}
    cables = {
        far: Cable(address, out=(up["engine"], down[far]), back=(up[far], down["engine"]))
        for far, address in ends.items()
    }
    async with AsyncExitStack() as stack:
        for cable in cables.values():
            await stack.enter_async_context(cable)
        requested.send({far: cable.address for far, cable in cables.items()})
        said: asyncio.Queue[None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.add_reader(requested.fileno(), said.put_nowait, None)
        while True:
            await said.get()
            if not requested.poll():
                continue  # a spurious second wake-up for the same message
            try:
                words = requested.recv()
            except EOFError:
                break
            if words[0] == "shape":
                for wire in (*up.values(), *down.values()):
                    wire.bytes_per_s = words[1]
                for cable in cables.values():
                    cable.latency_s = words[2]
                requested.send(None)
            else:
                directions = {"out": up, "in": down}
                requested.send(
                    {
                        f"{machine} {name}": wires[machine].carried
                        for machine in MACHINES
                        for name, wires in directions.items()
                    }
                )
        loop.remove_reader(requested.fileno())
