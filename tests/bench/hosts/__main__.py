"""`python -m tests.bench.hosts CHECKPOINT`: one host, and two hosts over several links.

Engine, encoder and generator stand for three machines. With *one host* they are one machine. With
*two hosts* encoder and generator are on other machines than the engine, and all data goes through
it. Each round measures both setups and all links in turns. Outputs are compared: every setup must
give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.hosts.links import Links
from tests.bench.hosts.load import Asked, Pictures
from tests.bench.report.pairs import spread
from tests.host_process import HostProcess, running
from vsched import Config, Engine
from vsched.aio.hosts.link import write_key_file
from vsched.config import load_config

ONE, TWO = WAYS = ("one host", "two hosts")
SETTINGS = (
    "placement=separate",
    "encode.threads=1",
    "generate.threads=1",
    "media.threads=1",
    'generate.memory={use="pinned", tokens=16384}',
    "arena.pixel_bytes=134217728",
    "arena.embedding_bytes=67108864",
    "cluster.connect_s=120",
    "deadlines.rank_timeout_s=120",
)
NO_RATE = "none"
BYTES_PER_MBIT = 125_000.0


@dataclass(frozen=True)
class Load:
    """Load: single requests for the time to first token, then several at once."""

    alone: int
    busy: int
    clients: int
    tokens: int
    side: int

    @property
    def pictures(self) -> int:
        """Number of pictures for one measurement."""
        return self.clients + self.alone + self.busy

    def parts(self, start: int) -> tuple[range, range, range]:
        """Return the picture numbers, starting at `start`, for warm-up, for one client and for several."""
        alone = start + self.clients
        busy = alone + self.alone
        return range(start, alone), range(alone, busy), range(busy, busy + self.busy)


@dataclass
class Cell:
    """All rounds of one setup over one link."""

    alone: list[Asked] = field(default_factory=list)
    busy: list[Asked] = field(default_factory=list)
    carried: list[dict[str, int]] = field(default_factory=list)
    """Bytes over each link during concurrent requests."""

    @property
    def images_s(self) -> list[float]:
        """Images per second, by round."""
        return [requested.images_s for requested in self.busy]

    def an_image(self, link: str) -> float:
        """Return the bytes per image over a link."""
        return statistics.median(
            carried[link] / len(requested.ttft_ms)
            for carried, requested in zip(self.carried, self.busy, strict=True)
        )

    def share(self, link: str, bytes_per_s: float) -> float:
        """Return the used share of a link's rate."""
        return statistics.median(
            carried[link] / requested.seconds / bytes_per_s
            for carried, requested in zip(self.carried, self.busy, strict=True)
        )


Cells = dict[tuple[str, str], Cell]


def hosts(key: Path) -> tuple[HostProcess, HostProcess]:
    """Return the hosts of encoder and generator."""
    return HostProcess("encoder", "127.0.0.2", key), HostProcess("generator", "127.0.0.3", key)


def config_of(checkpoint: str, sets: Sequence[str], *more: str) -> Config:
    """Return the configuration of an engine."""
    every = [*SETTINGS, f"model.path={checkpoint}", *more, *sets]
    return load_config(None, sets=every, environ={}).config


def placed(encoder: str, generator: str, key: Path) -> list[str]:
    """Return the settings that place the stages on these hosts."""
    return [
        f'cluster.hosts={{encoder = "{encoder}", generator = "{generator}"}}',
        f"cluster.key_file={key}",
        'cluster.encode=["encoder"]',
        'cluster.generate=["generator"]',
    ]


class Bench:
    """Measures all setups in turns.

    Attributes:
        cells: Results by setup and link.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.cells: Cells = {}
        self._options = options
        self._key = folder / "hosts.key"
        write_key_file(self._key)
        self._load = Load(
            options.alone, options.requests, options.clients, options.tokens, options.side
        )
        self._rates = [NO_RATE, *(rate for rate in options.links if rate != NO_RATE)]
        self._pictures = Pictures(self._load.pictures * len(self._rates), options.side)
        self._expected: dict[int, list[int]] = {}

    async def round(self, number: int) -> None:
        """Measure every setup over every link once."""
        turned = [WAYS[(number + index) % len(WAYS)] for index in range(len(WAYS))]
        for way in turned:
            if way == ONE:
                async with Engine(self._config("cluster.hosts={}")) as engine:
                    await self._measure(engine, way, NO_RATE, None)
                continue
            encoder, generator = hosts(self._key)
            with running(encoder, generator):
                where = placed(encoder.address, generator.address, self._key)
                if NO_RATE in self._options.links:
                    async with Engine(self._config(*where)) as engine:
                        await self._measure(engine, way, NO_RATE, None)
                with Links(encoder.address, generator.address) as links:
                    ends = links.addresses
                    where = placed(ends["encoder"], ends["generator"], self._key)
                    async with Engine(self._config(*where)) as engine:
                        for rate in self._rates[1:]:
                            await self._measure(engine, way, rate, links)

    def _config(self, *more: str) -> Config:
        return config_of(self._options.checkpoint, self._options.set, *more)

    async def _measure(self, engine: Engine, way: str, rate: str, links: Links | None) -> None:
        """Send one client's requests, then those of several, about pictures that are new to this engine."""
        load, latency_s = self._load, self._options.latency_ms / 1e3
        cell = self.cells.setdefault((way, rate), Cell())
        start = self._rates.index(rate) * load.pictures
        warm, alone, busy = load.parts(start)
        if links is not None:
            links.shape(0, 0)
        await self._ask(engine, warm, load.clients)
        if links is not None:
            links.shape(float(rate) * BYTES_PER_MBIT, latency_s)
        cell.alone.append(await self._ask(engine, alone, 1))
        before = links.carried() if links is not None else {}
        cell.busy.append(await self._ask(engine, busy, load.clients))
        after = links.carried() if links is not None else {}
        cell.carried.append({link: after[link] - before[link] for link in after})
        note = f"{way}, {rate}: {cell.images_s[-1]:.1f} images/s"
        print(note, file=sys.stderr, flush=True)

    async def _ask(self, engine: Engine, numbers: Sequence[int], at_once: int) -> Asked:
        requested = await self._pictures.ask(
            engine, numbers, at_once=at_once, tokens=self._load.tokens
        )
        for number, tokens in requested.tokens.items():
            expected = self._expected.setdefault(number, tokens)
            if tokens != expected:
                raise AssertionError(f"picture {number}: {tokens}, and elsewhere {expected}")
        return requested


HEAD = (
    "| link | way | images/s | to one host's | TTFT alone, ms | TTFT of all, ms | engine out, MB | engine in, MB "
    "| encoder out, MB | busiest link | of its rate |\n"
    "|---:|---|---:|---:|---:|---:|---:|---:|---:|---|---:|"
)


def lines(cells: Cells, rates: Sequence[str]) -> Iterator[str]:
    """Yield the rows of the table."""
    one = cells[ONE, NO_RATE]
    yield _line(NO_RATE, ONE, one, one)
    for rate in rates:
        yield _line(rate, TWO, cells[TWO, rate], one)


def _line(rate: str, way: str, cell: Cell, one: Cell) -> str:
    ratios = [mine / theirs for mine, theirs in zip(cell.images_s, one.images_s, strict=True)]
    words = [
        "" if rate == NO_RATE else f"{rate} Mbit/s",
        way,
        _spread(cell.images_s),
        "" if cell is one else spread(ratios),
        _spread([statistics.median(requested.ttft_ms) for requested in cell.alone]),
        _spread([statistics.median(requested.ttft_ms) for requested in cell.busy]),
    ]
    if cell.carried[0]:
        links = ("engine out", "engine in", "encoder out")
        words += [f"{cell.an_image(link) / 1e6:.2f}" for link in links]
        bytes_per_s = float(rate) * BYTES_PER_MBIT
        busiest = max(cell.carried[0], key=lambda link: cell.share(link, bytes_per_s))
        words += [busiest, f"{cell.share(busiest, bytes_per_s):.0%}"]
    else:
        words += [""] * 5
    return f"| {' | '.join(words)} |"


def _spread(values: Sequence[float]) -> str:
    digits = 1 if statistics.median(values) < 100 else 0
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hosts")
    parser.add_argument("checkpoint")
    parser.add_argument(
        "--links",
        nargs="+",
        default=[NO_RATE, "1000", "100"],
        help=f"rates of each link in Mbit/s; {NO_RATE} is without cables, and counts no bytes",
    )
    parser.add_argument("--latency-ms", type=float, default=0.2, help="of each link with a rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", type=int, default=6, help="questions of one client")
    parser.add_argument("--requests", type=int, default=24, help="questions of several clients")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--side", type=int, default=448, help="of a picture, in pixels")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    async def measure(bench: Bench) -> None:
        for number in range(options.rounds):
            await bench.round(number)

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        asyncio.run(measure(bench))
    print(HEAD)
    for line in lines(bench.cells, options.links):
        print(line)


if __name__ == "__main__":
    main()
