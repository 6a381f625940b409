"""Clients in a separate process: `python -m tests.bench.parts.lag.client_process_main ORDER`.

Each client sends one request after another, on new connections, until the time is over.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

ANSWER_S = 180.0


class ClientsOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the client process.

    Attributes:
        bodies: URL path and body file of each request; an empty file name for a GET.
        requests: Maximum requests per client; 0 for as many as fit in `seconds`.
    """

    host: str
    port: int
    bodies: list[tuple[str, str]]
    clients: int
    seconds: float = 0.0
    requests: int = 0


async def ask(order: ClientsOrder, path: str, body: bytes) -> int:
    """Send one request, read the whole response, and return its status."""
    reader, writer = await asyncio.open_connection(order.host, order.port, limit=2**20)
    try:
        head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: {order.host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        status = 0
        async with asyncio.timeout(ANSWER_S):
            line = await reader.readline()
            status = int(line.split()[1]) if line else 0
            while await reader.read(2**20):
                pass
        return status
    finally:
        writer.close()


async def run(order: ClientsOrder, bodies: list[tuple[str, bytes]]) -> Counter[str]:
    """Run the load; return the number of responses by status."""
    outcomes: Counter[str] = Counter()
    until = time.monotonic() + order.seconds

    async def client(number: int) -> None:
        rng = random.Random(number)
        sent = 0
        while sent < order.requests or (not order.requests and time.monotonic() < until):
            sent += 1
            try:
                outcomes[str(await ask(order, *rng.choice(bodies)))] += 1
            except (OSError, TimeoutError) as error:
                outcomes[type(error).__name__] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(order.clients):
            group.create_task(client(number))
    return outcomes


if __name__ == "__main__":
    sent = msgspec.json.decode(sys.argv[1], type=ClientsOrder)
    read = [(path, Path(name).read_bytes() if name else b"") for path, name in sent.bodies]
    found = asyncio.run(run(sent, read))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
