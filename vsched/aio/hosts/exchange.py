"""Which hosts have which embedding rows, and how rows get to the hosts whose chunks read them.

Rows stay where they were encoded. While a batch is being encoded, the hosts of the replicas that have requests waiting
for it ask the encoder's host for its rows, and the result of the batch is heard when all have them: so a chunk finds
its rows there, and no step waits for bytes of another host. Where that way is missing, is not reached or broke, rows go
through the engine's arena, as do those that another replica reads later on: then everything after them waits.

A way is one connection from the start of a worker group that reads to the start of one that encodes. The engine makes
its keys, has the one side admit them and the other use them, and counts on it only once both have answered. Whatever
befalls it costs time, and neither a request nor a group. Where the network is trusted, nothing there is encrypted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import zmq

from vsched.aio.hosts.messages import Admit, ByteRange, CutWay, Reach, ToHost
from vsched.aio.hosts.rows import Then
from vsched.aio.hosts.stream import Stream
from vsched.aio.hosts.traffic import RowsRead, written_by
from vsched.kernel.decisions import EncodeDecision, EncodeTask
from vsched.types import ArenaLayout, replica_of, stage_of

logger = logging.getLogger(__name__)
RETRY_S = 10.0
"""How long a way that broke is left alone."""


class ServedHost(Protocol):
    """Another host, for one start; see `vsched.aio.hosts.remote.RemoteHost`."""

    @property
    def name(self) -> str: ...
    @property
    def groups(self) -> Sequence[str]: ...
    @property
    def layout(self) -> ArenaLayout: ...
    @property
    def stream(self) -> Stream: ...
    @property
    def where(self) -> tuple[str, bytes]: ...
    @property
    def bytes_fetched(self) -> int: ...

    def say(self, message: ToHost) -> bool: ...

    def give_up(self, why: str) -> None: ...

    def fetch(
        self, ranges: Sequence[ByteRange], then: Then, *, group: str = "", step: int = 0
    ) -> None: ...

    def pull(
        self, ranges: Sequence[ByteRange], then: Then, *, key: bytes, group: str, step: int
    ) -> None: ...


class Way:
    """A connection from the host of a reader to that of an encoder; `reached` once it can be used."""

    def __init__(self, source: ServedHost, reader: ServedHost) -> None:
        self.source, self.reader = source, reader
        self.public, self.secret = zmq.curve_keypair()
        self.reached = False


class Delivery:
    """The rows of one batch on their way to those who read them; `then` is called once none is under way any more."""

    def __init__(self, batch: EncodeDecision) -> None:
        self.batch = batch
        self.through_engine = False
        self.missing: dict[ServedHost, Sequence[EncodeTask]] = {}
        self.come: dict[ServedHost, Sequence[EncodeTask]] = {}
        self.then: Callable[[], object] | None = None

    def settle(self, reader: ServedHost, came: bool) -> None:
        """A reader has its rows, or gets none."""
        tasks = self.missing.pop(reader, None)
        if tasks is None:
            return
        if came:
            self.come[reader] = tasks
        if not self.missing and self.then is not None:
            self.then()


class Exchange:
    """The rows of one engine's hosts; `direct` says that every rank is on one, so that they may go without the engine.

    Attributes:
        encrypted: Whether nobody can read them on their way from host to host.
        bytes_direct: Rows that went from host to host.
    """

    def __init__(self, *, direct: bool, encrypted: bool) -> None:
        self.direct, self.encrypted = direct, encrypted
        self.bytes_direct = 0
        self._engine = object()
        self._owners: dict[int, set[object]] = {}
        self._readers: dict[int, ServedHost] = {}
        self._ways: dict[tuple[ServedHost, ServedHost], Way] = {}
        self._rest_until_s: dict[tuple[str, str], float] = {}

    # --- hosts come and go ---

    def join(self, host: ServedHost) -> None:
        """A host serves the groups of its start."""
        for group in host.groups:
            if stage_of(group) == "generate":
                self._readers[replica_of(group)] = host

    def leave(self, host: ServedHost) -> list[int]:
        """A host is gone, with its arena; return the pages whose rows nobody has any more."""
        for replica in [one for one, reader in self._readers.items() if reader is host]:
            del self._readers[replica]
        for way in [*self._ways.values()]:
            if host in (way.source, way.reader):
                self._drop(way)
        gone = []
        for page, owners in self._owners.items():
            if host in owners:
                owners.discard(host)
                if not owners:
                    gone.append(page)
        return gone

    # --- rows that are encoded ---

    def begin(self, source: ServedHost, group: str, batch: EncodeDecision) -> Delivery:
        """A batch is to be encoded: have its rows sent to who reads them, or to the engine."""
        delivery = Delivery(batch)
        for task in batch.tasks:
            for page in task.pages:
                self._owners.pop(page, None)
        ways = self._ways_of(source, batch)
        if ways is None:
            delivery.through_engine = True
            delivery.missing[source] = batch.tasks
            ranges = written_by(source.layout, batch.tasks)
            source.fetch(ranges, partial(delivery.settle, source), group=group, step=batch.step)
            return delivery
        for reader, (way, tasks) in ways.items():
            delivery.missing[reader] = tasks
            ranges = written_by(source.layout, tasks)
            then = partial(self._pulled, delivery, reader, ranges)
            reader.pull(ranges, then, key=way.public, group=group, step=batch.step)
        return delivery

    def _ways_of(
        self, source: ServedHost, batch: EncodeDecision
    ) -> dict[ServedHost, tuple[Way, list[EncodeTask]]] | None:
        """Return the ways to all other hosts that read rows of a batch; None where one of them cannot be used."""
        if not self.direct:
            return None
        found: dict[ServedHost, tuple[Way, list[EncodeTask]]] = {}
        complete = True
        for task in batch.tasks:
            for replica in task.readers:
                reader = self._readers.get(replica)
                if reader is source:
                    continue
                way = None if reader is None else self._way(source, reader)
                if reader is None or way is None:
                    complete = False
                else:
                    found.setdefault(reader, (way, []))[1].append(task)
        return found if complete else None

    def _pulled(
        self,
        delivery: Delivery,
        reader: ServedHost,
        ranges: Sequence[ByteRange],
        came: bool,
    ) -> None:
        if came:
            self.bytes_direct += sum(where.size for where in ranges)
        delivery.settle(reader, came)

    def give_up(self, source: ServedHost, delivery: Delivery) -> None:
        """Wait for the rows of a batch no longer: who does not have them gets them through the engine."""
        for reader in [*delivery.missing]:
            way = self._ways.get((source, reader))
            if way is not None:
                self._break(way, "was too slow")
            delivery.settle(reader, came=False)

    def finish(self, source: ServedHost, delivery: Delivery) -> None:
        """A batch was encoded, and nothing of it is under way."""
        for task in delivery.batch.tasks:
            owners: set[object] = {source}
            if not self.direct or (delivery.through_engine and source in delivery.come):
                owners.add(self._engine)
            for reader, tasks in delivery.come.items():
                if task in tasks:
                    owners.add(reader)
            for page in task.pages:
                self._owners[page] = owners if page == task.pages[0] else {*owners}

    # --- rows that are read ---

    def bring(self, reader: ServedHost, rows: RowsRead) -> None:
        """Let rows be there before what is said to their reader after this."""
        owners = self._owners.get(rows.pages[0])
        if owners is not None and self.direct and reader in owners:
            return
        if owners is None or not self.direct or self._engine in owners:
            for where in rows.read:
                reader.stream.put_range(where)
            return
        barrier = reader.stream.put_barrier()
        hosts = [one for one in owners if one is not self._engine]
        self._fetch(rows, hosts, lambda: reader.stream.lift(barrier, rows.read), reader)

    def _fetch(
        self, rows: RowsRead, hosts: list[object], then: Callable[[], object], reader: ServedHost
    ) -> None:
        """Get all rows of an item from one of these hosts into the engine's arena."""
        if not hosts:
            reader.give_up("was to read rows that went with another host")
            return
        owner, *others = hosts

        def fetched(came: bool) -> None:
            if came:
                for page in rows.pages:
                    self._owners.setdefault(page, set()).add(self._engine)
                then()
            else:
                self._fetch(rows, others, then, reader)

        owner.fetch(rows.all, fetched)  # type: ignore[attr-defined]

    # --- ways ---

    def _way(self, source: ServedHost, reader: ServedHost) -> Way | None:
        """Return a way that can be used; begin one where there is none."""
        way = self._ways.get((source, reader))
        if way is not None:
            return way if way.reached else None
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._rest_until_s.get((source.name, reader.name), 0.0) and source.where[0]:
            way = self._ways[source, reader] = Way(source, reader)
            source.say(Admit(way.public, self.encrypted))
        return None

    def _by_key(self, key: bytes) -> Way | None:
        return next((way for way in self._ways.values() if way.public == key), None)

    def admitted(self, key: bytes, port: int) -> None:
        """The encoder's host knows the key: have the other use it.

        Under CURVE that is where engines come, whatever port they know; without, where the host says.
        """
        way = self._by_key(key)
        if way is not None:
            address, host_key = way.source.where
            if not self.encrypted:
                address = f"{address.rpartition(':')[0]}:{port}"
            way.reader.say(Reach(address, host_key, way.public, way.secret, self.encrypted))

    def reached(self, key: bytes) -> None:
        """Both hosts have answered."""
        way = self._by_key(key)
        if way is not None:
            logger.info("host %s: reached by host %s", way.source.name, way.reader.name)
            way.reached = True

    def unreached(self, key: bytes, why: str) -> None:
        """A way cannot be used, or no more."""
        way = self._by_key(key)
        if way is not None:
            self._break(way, why)

    def _break(self, way: Way, why: str) -> None:
        source, reader = way.source.name, way.reader.name
        logger.warning("host %s: host %s %s; rows go through the engine", reader, source, why)
        self._rest_until_s[source, reader] = asyncio.get_running_loop().time() + RETRY_S
        self._drop(way)

    def _drop(self, way: Way) -> None:
        del self._ways[way.source, way.reader]
        for host in (way.source, way.reader):
            host.say(CutWay(way.public))
