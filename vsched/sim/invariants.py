"""Invariants that hold after every event under any policy.

There are two kinds of checks. External checks keep their own records and cost time only for what
changed: the owner of each block and page, the contents of each step, terminal replies, and the
order of admission. The kernel's own `check_invariants` scans the whole state; with large pools it
runs only once in a fixed number of events, and after every event that is not routine.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from vsched.errors import VschedError
from vsched.kernel import Scheduler
from vsched.kernel.commands import Accept, Command, Decide, Finish, Refuse, SetTimer
from vsched.kernel.decisions import ChunkPlan, EncodeDecision, GenerateDecision, Join
from vsched.kernel.events import (
    Arrived,
    Encoded,
    EncodeFailed,
    Event,
    GroupLost,
    PolicyReplaced,
    Stepped,
    Submitted,
)
from vsched.kernel.generate.requests import ReadyEntry
from vsched.plugins import load_policy_class
from vsched.policy import seats_in
from vsched.sim.setup import Setup
from vsched.types import MediaItem, group_names, stage_of

BLOCKS_AN_EVENT = 64
"""Average number of blocks and pages per event that full-state checks may scan."""
ROUTINE = (Stepped, Arrived, Submitted, Encoded)
WAITING_MAX_NS = 24 * 3600 * 1_000_000_000
"""Maximum waiting time if the configuration sets no limit: one day."""


class SimulationFailed(VschedError):
    """An invariant was broken; the message names the event and how to reproduce it."""


class _Generator:
    """Blocks and slots of a generate group, derived from its decisions."""

    def __init__(self, blocks: int) -> None:
        self.holders = [0] * blocks
        self.slots: dict[int, tuple[int, list[int]]] = {}
        self.decoding: set[int] = set()
        self.lengths: dict[int, int] = {}
        self.out: deque[tuple[int, list[int]]] = deque()
        self.swap_slots: dict[int, tuple[int, int]] = {}

    def swap_out(self, decision: GenerateDecision) -> None:
        """Check swap-out copies: only blocks that a leaving request alone holds and keeps."""
        leaving = {
            block: (leave.number, index)
            for leave in decision.left
            if leave.keep
            for index, block in enumerate(self.slots[leave.slot][1])
            if self.holders[block] == 1
        }
        assert decision.swaps is not None
        out = decision.swaps.out
        for block, swap_slot in zip(out[::2], out[1::2], strict=True):
            assert block in leaving, f"block {block} is swapped out but not released"
            self.swap_slots[swap_slot] = leaving[block]

    def swap_in(self, decision: GenerateDecision) -> None:
        """Check swap-in copies: each block returns to its request and its place in the sequence.

        Requests that join later in the same decision may share its blocks, because copies come
        before steps.
        """
        joined: dict[int, list[tuple[int, int]]] = {}
        for join in decision.joined:
            for index, block in enumerate(join.blocks):
                joined.setdefault(block, []).append((join.number, index))
        assert decision.swaps is not None
        back = decision.swaps.back
        for swap_slot, block in zip(back[::2], back[1::2], strict=True):
            sharing = joined.get(block, [])
            assert self.holders[block] == len(sharing), (
                f"block {block} is swapped in while other requests hold it"
            )
            assert self.swap_slots.pop(swap_slot, None) == sharing[0], (
                f"block {block} gets the content of swap slot {swap_slot}, which belongs to another request"
            )

    def release(self, slot: int, number: int) -> None:
        held, blocks = self.slots.pop(slot)
        assert held == number, f"request {number} leaves slot {slot}, which request {held} has"
        self.decoding.discard(slot)
        for block in blocks:
            self.holders[block] -= 1


class Oracles:
    """Checks every promise of `vsched simulate --oracles`; raises `AssertionError`.

    - A block belongs to one request, unless it is a cached prefix that several read; a page belongs
      to one image. Nothing is written while a step reads it, and a step reads the embeddings of its
      own requests' images.
    - Only a block with a single holder is swapped out, and it is swapped in for the same request at
      the same place.
    - A step stays within its limits of tokens, slots, images and image tokens.
    - Every accepted request gets exactly one terminal reply, and a refused one gets no other reply.
    - Under `fifo`, no request is admitted before an older one of the same waiting queue.
    - No request waits longer than `deadlines.waiting_s`, or a day.
    """

    def __init__(self, setup: Setup, *, check_every: int | None = None) -> None:
        """Prepare for a simulation; `check_every` is the number of events between full-state checks."""
        limits = self._limits = setup.limits
        scanned = limits.blocks * limits.generators + limits.pages
        self.check_every = check_every or max(scanned // BLOCKS_AN_EVENT, 1)
        self._events = 0
        self._generators = {
            name: _Generator(limits.blocks) for name in group_names("generate", limits.generators)
        }
        self._fifo = _is_fifo(setup)
        self._lines: dict[str, list[ReadyEntry]] = {}
        self._image_tokens_max = setup.policies.item_tokens_max or 0
        self._items: dict[int, tuple[MediaItem, ...]] = {}
        self._prompts: dict[int, int] = {}
        self._ids: dict[int, str] = {}
        self._unstarted: dict[int, int] = {}
        self._entering: dict[str, Submitted] = {}
        self._pages: dict[int, bytes] = {}
        self._reading: Counter[int] = Counter()
        self._writing: dict[str, EncodeDecision] = {}
        self._waiting_ns = limits.waiting_ns or WAITING_MAX_NS

    def see(
        self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
    ) -> None:
        """Check an event and the resulting commands."""
        self._events += 1
        self._take_event(event)
        joined: list[tuple[str, Join]] = []
        for command in commands:
            if type(command) is Decide:
                decision = command.decision
                if isinstance(decision, GenerateDecision):
                    self._check_step(command.group, decision)
                    joined += [(command.group, join) for join in decision.joined]
                else:
                    self._check_batch(command.group, decision)
            else:
                self._take_command(command, now_ns)
        if self._fifo:
            if joined:
                self._check_order(joined, kernel)
            for stage in kernel.generators:
                self._lines[stage.name] = list(stage.queue.entries)
        if self._unstarted:
            self._check_waiting(now_ns)
        if not isinstance(event, ROUTINE) or self._events % self.check_every == 0:
            kernel.check_invariants()

    # --- events and replies ---

    def _take_event(self, event: Event) -> None:
        if type(event) is Stepped:
            step, pages = self._generators[event.group].out.popleft()
            assert step == event.step, f"step {event.step} completed, but {step} was pending"
            if pages:  # a Counter is slow even when there is nothing to subtract
                self._reading.subtract(pages)
        elif type(event) is Submitted:
            names = [event.request.request_id, *(one.request_id for one in event.further)]
            self._entering = dict.fromkeys(names, event)
        elif type(event) is Encoded:
            for task in self._writing.pop(event.group).tasks:
                self._pages.update(dict.fromkeys(task.pages, task.key))
        elif type(event) is EncodeFailed:
            del self._writing[event.group]
        elif type(event) is GroupLost:
            self._lose_group(event.group)
        elif type(event) is PolicyReplaced:
            for path, table in event.tables.items():
                if "generate.admission" in seats_in(path, table):
                    self._fifo = table == {"use": "fifo"}

    def _lose_group(self, group: str) -> None:
        if stage_of(group) == "encode":
            self._writing.pop(group, None)
            return
        for _, pages in self._generators[group].out:
            self._reading.subtract(pages)
        self._generators[group] = _Generator(self._limits.blocks)

    def _take_command(self, command: Command, now_ns: int) -> None:
        match command:
            case Accept(request_id, number):
                assert request_id in self._entering, "accepted without being submitted, or twice"
                request = self._entering.pop(request_id).request
                assert number not in self._ids, "accepted twice"
                self._ids[number] = request_id
                self._items[number] = request.items
                self._prompts[number] = len(request.prompt_token_ids)
                self._unstarted[number] = now_ns
            case Refuse(request_id):
                assert request_id in self._entering, "refused without being submitted, or twice"
                submitted = self._entering.pop(request_id)
                for one in submitted.further:
                    assert self._entering.pop(one.request_id, None), "refused though accepted"
            case Finish(request_id, number):
                assert self._ids.pop(number, None) == request_id, (
                    f"an unexpected terminal reply to {request_id}"
                )
                del self._items[number], self._prompts[number]
                self._unstarted.pop(number, None)
            case SetTimer(deadline_ns):
                assert deadline_ns > now_ns, "a timer in the past"
            case _:
                pass

    def _check_waiting(self, now_ns: int) -> None:
        number, since_ns = next(iter(self._unstarted.items()))  # the oldest: numbers are in order
        assert now_ns - since_ns <= self._waiting_ns, (
            f"{self._ids[number]} has waited for {(now_ns - since_ns) / 1e9:.1f} s"
        )

    def _check_order(self, joined: Sequence[tuple[str, Join]], kernel: Scheduler) -> None:
        """Check under fifo that a request left in the queue is younger than those that joined.

        A request that left the queue because it lost an embedding, and returned, has a new entry:
        it could not run meanwhile.
        """
        for stage in kernel.generators:
            numbers = [join.number for group, join in joined if group == stage.name]
            before = {id(entry) for entry in self._lines.get(stage.name, ())}
            stayed = next((one for one in stage.queue.entries if id(one) in before), None)
            if numbers and stayed is not None:
                assert stayed.state.losses or stayed.state.number > max(numbers), (
                    f"request {max(numbers)} went before request {stayed.state.number}, which is older"
                )

    # --- generate steps ---

    def _check_length(self, number: int, chunk: ChunkPlan) -> None:
        """Check that no chunk splits an atomic span, and that only an atomic span exceeds the chunk limit."""
        whole: list[tuple[int, int]] = []
        if self._limits.prompt_atomic:
            whole = [(0, self._prompts[number])]
        elif self._limits.item_atomic:
            whole = [atom for item in self._items[number] for atom in item.atoms]
        assert not any(first < chunk.stop < end for first, end in whole), "a chunk cuts an atom"
        last = [end for first, end in whole if first <= chunk.start < end]
        longest = max([self._limits.chunk_tokens, *(end - chunk.start for end in last)])
        assert chunk.stop - chunk.start <= longest, "a chunk is too long"

    def _check_step(self, group: str, decision: GenerateDecision) -> None:
        limits, own = self._limits, self._generators[group]
        holders = own.holders
        if decision.swaps is not None:
            own.swap_out(decision)
        for leave in decision.left:
            own.release(leave.slot, leave.number)
        for join in decision.joined:
            self._join(own, join)
        if decision.swaps is not None:
            own.swap_in(decision)
        grown = decision.grown
        for slot, block in zip(grown[::2], grown[1::2], strict=True):
            assert holders[block] == 0, f"block {block} grows in slot {slot}, and is held already"
            holders[block] = 1
            own.slots[slot][1].append(block)
        decodes = len(own.decoding)
        pages: list[int] = []
        tokens = decodes
        for chunk in decision.chunks:
            tokens += chunk.stop - chunk.start
            number, blocks = own.slots[chunk.slot]
            self._check_length(number, chunk)
            assert len(blocks) * limits.block_size >= chunk.stop, "a chunk has no blocks to go to"
            items = [
                item
                for item in self._items[number]
                if item.offset < chunk.stop and item.end > chunk.start
            ]
            assert [one.offset for one in chunk.items] == [one.offset for one in items]
            for planned, item in zip(chunk.items, items, strict=True):
                self._check_read(planned.pages, item)
                pages += planned.pages
            if chunk.stop == own.lengths[chunk.slot]:
                own.decoding.add(chunk.slot)
        assert tokens <= limits.batch_tokens, f"{tokens} tokens in a step"
        assert len(own.slots) <= limits.slots, f"{len(own.slots)} requests run"
        if pages:
            self._reading.update(pages)
        own.out.append((decision.step, pages))
        assert len(own.out) <= limits.generate_depth, f"{len(own.out)} steps are out"

    def _join(self, own: _Generator, join: Join) -> None:
        assert join.slot not in own.slots, f"slot {join.slot} was given twice"
        assert join.number in self._ids, f"request {join.number} joins after its end"
        shared = join.computed // self._limits.block_size
        assert len(join.blocks) == self._limits.blocks_for(join.length), (
            "blocks and length disagree"
        )
        for block in join.blocks[shared:]:
            assert own.holders[block] == 0, f"block {block} is given twice"
        for block in join.blocks:
            own.holders[block] += 1
        own.slots[join.slot] = (join.number, list(join.blocks))
        own.lengths[join.slot] = join.length
        self._unstarted.pop(join.number, None)

    def _check_read(self, pages: Sequence[int], item: MediaItem) -> None:
        assert len(pages) == self._limits.pages_for(item.tokens), "pages and tokens disagree"
        assert all(self._pages.get(page) == item.key for page in pages), (
            "a step reads pages that hold something else than its image"
        )

    # --- encode steps ---

    def _check_batch(self, group: str, decision: EncodeDecision) -> None:
        tasks = decision.tasks
        assert group not in self._writing, f"two batches are out at {group}"
        assert len(tasks) <= self._limits.encode_items, f"{len(tasks)} images in a step"
        tokens = sum(task.tokens for task in tasks if not task.encoded)
        limit = self._image_tokens_max
        assert not limit or len(tasks) == 1 or tokens <= limit, f"{tokens} image tokens in a step"
        busy = [
            page for batch in self._writing.values() for task in batch.tasks for page in task.pages
        ]
        pages = [page for task in tasks for page in task.pages]
        assert len({*busy, *pages}) == len(busy) + len(pages), "a page is given to two images"
        assert not any(self._reading[page] for page in pages), "a page is written while it is read"
        for task in tasks:
            assert len(task.pages) == self._limits.pages_for(task.tokens), (
                "pages and tokens disagree"
            )
        for page in pages:
            self._pages.pop(page, None)
        self._writing[group] = decision


def _is_fifo(setup: Setup) -> bool:
    """Return True if the admission policy in use, which may not be the configured one, is `fifo`."""
    policy = setup.policies.by_table["generate.admission"]
    fifo = load_policy_class("admission", "fifo")
    return type(policy) is fifo
