"""The life of a request, from its arrival to its end.

It *claims* the items for its next chunk, is *enqueued* once that chunk could run, and *finishes* with exactly one
terminal command. Waiting, preemption, recovery and moves to other groups consist of these three. Methods return the
commands that follow. Requests that can never be served, or not now, are refused at once; the others are routed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from vsched.kernel.commands import Accept, Command, Finish, RefusalCode, Refuse, RequestTimes
from vsched.kernel.encode.embedding_cache import EmbeddingCache
from vsched.kernel.events import FurtherChoice, Submitted
from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.groups import DirtyGroups
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import (
    DECODE,
    ITEMS,
    PREFILL,
    PROMPT,
    READY,
    SUSPENDED,
    Phase,
    RequestState,
    RequestTable,
    choices_root,
    host_bytes,
    int32,
    root_hash,
)
from vsched.policy import EncodingView, ItemSpan, ReplicaView, RoutingView
from vsched.policy.measured import Measured
from vsched.policy.router import default_replica
from vsched.policy_host.seats import PolicySeat, PolicySeats
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.probes import probe
from vsched.types import FinishReason, MediaItem, Request, count_of


def refuse_impossible(
    request: Request, limits: SchedulerLimits, *, emitted: int = 0
) -> Refuse | None:
    """Return the refusal of a request that can never be served with these limits; None for others.

    `emitted` is the number of outputs from an earlier engine.
    """
    name, prompt = request.request_id, len(request.prompt_token_ids)
    outputs = request.sampling.max_tokens
    total = prompt + outputs
    if not prompt or outputs - emitted < 1:
        return Refuse(name, RefusalCode.EMPTY, prompt, 1, detail=(outputs - emitted,))
    if not _items_fit(request.items, prompt):
        spans = tuple(at for item in request.items for run in item.runs for at in run)
        return Refuse(name, RefusalCode.BAD_ITEMS, limit=prompt, detail=spans)
    if total > limits.context_tokens:
        context = limits.context_tokens
        return Refuse(name, RefusalCode.CONTEXT_EXCEEDED, total, context, "generate.context_tokens")
    if limits.blocks_for(total) > limits.blocks:
        room = limits.blocks * limits.block_size
        return Refuse(name, RefusalCode.KV_EXCEEDED, total, room, "generate.memory")
    return _refuse_atoms(request, limits) or _refuse_images(request, limits)


def _refuse_atoms(request: Request, limits: SchedulerLimits) -> Refuse | None:
    largest = 0
    if limits.prompt_atomic:
        largest = len(request.prompt_token_ids)
    elif limits.item_atomic:
        atoms = (end - first for item in request.items for first, end in item.atoms)
        largest = max(atoms, default=0)
    if largest <= limits.atom_tokens:
        return None
    code, setting = RefusalCode.CHUNK_EXCEEDED, "generate.max_batch_tokens"
    return Refuse(request.request_id, code, largest, limits.atom_tokens, setting)


def _refuse_images(request: Request, limits: SchedulerLimits) -> Refuse | None:
    name, setting = request.request_id, "arena.embedding_bytes"
    room = limits.pages * limits.page_rows
    for item in request.items:
        if limits.pages_for(item.tokens) > limits.pages:
            return Refuse(name, RefusalCode.IMAGE_EXCEEDS_CACHE, item.tokens, room, setting)
    if not limits.prompt_atomic:
        return None
    # All images must be in the cache at once, with one entry for equal ones.
    entries = {item.key: item.tokens for item in request.items}
    pages = sum(map(limits.pages_for, entries.values()))
    if pages > limits.pages:
        tokens, rows = pages * limits.page_rows, limits.page_rows
        code = RefusalCode.IMAGES_EXCEED_CACHE
        return Refuse(name, code, tokens, room, setting, detail=(rows,))
    return None


def _items_fit(items: tuple[MediaItem, ...], prompt_tokens: int) -> bool:
    """Return True if items are in order, do not overlap, and lie within the prompt.

    Each of an item's rows, or of those that it keeps, has a placeholder, and its attention spans are within them.
    """
    for item in items:
        runs, rows = item.runs, item.tokens
        if item.kept:
            if not (item.spans and _ascend(item.kept, rows)):
                return False
            rows = count_of(item.kept)
        if item.offset != runs[0][0] or count_of(runs) != rows:
            return False
        if item.attention and not item.offset <= item.attention[0][0]:
            return False
        if not _ascend(item.attention or (), item.end):
            return False
    return _ascend([run for item in items for run in item.runs], prompt_tokens)


def _ascend(spans: Sequence[tuple[int, int]], stop: int) -> bool:
    """Return True if ranges are in order within [0, stop), and none is empty."""
    position = 0
    for start, end in spans:
        if not position <= start < end <= stop:
            return False
        position = end
    return True


ITEMS_MAX = 8192
"""Items whose replica is remembered; the one sent longest ago is dropped first."""


class Loads:
    """A cache of the loads of all generate groups, by index.

    Routing and the arrival policy read them for every request; asking each of 64 groups makes an arrival 50 % slower.

    Attributes:
        tokens: Tokens of all requests of each group.
        open: Whether each group takes new work.
        blocks: KV blocks of each group; fewer than the limit after a restart with less memory.
        tokens_total: The sum of `tokens`.
        slots_total: The number of slots that requests hold.
    """

    def __init__(self, groups: Sequence[GenerateGroup], dirty: DirtyGroups) -> None:
        self._groups = groups
        self.tokens = [0] * len(groups)
        self.open = [False] * len(groups)
        self.blocks = [0] * len(groups)
        self._slots = [0] * len(groups)
        self.tokens_total = self.slots_total = 0
        self._changed = dirty.changed

    def change(self, index: int) -> None:
        """Invalidate the numbers of a group, which has changed or is about to."""
        self._changed[index] = None

    def refresh(self) -> Loads:
        """Update the groups that have changed since the last call; return `self`."""
        for index in self._changed:
            group = self._groups[index]
            tokens, slots = group.load_tokens, group.slots_held
            self.tokens_total += tokens - self.tokens[index]
            self.slots_total += slots - self._slots[index]
            self.tokens[index], self._slots[index] = tokens, slots
            self.open[index], self.blocks[index] = group.open, group.blocks_total
        self._changed.clear()
        return self

    def check(self) -> None:
        """Assert that all numbers are up to date."""
        self.refresh()
        groups = self._groups
        assert self.tokens == [group.load_tokens for group in groups], (
            "a load has changed unnoticed"
        )
        assert self._slots == [group.slots_held for group in groups], "a slot has changed unnoticed"
        assert self.open == [group.open for group in groups], "a status has changed unnoticed"
        totals = sum(self.tokens), sum(self._slots)
        assert totals == (self.tokens_total, self.slots_total), "the totals of the loads are wrong"


class RoutedGroup(msgspec.Struct, frozen=True, eq=False):
    """A `ReplicaView` of a generate group; facts about the request are computed when read."""

    index: int
    _group: GenerateGroup
    _router: Router

    @property
    def load_tokens(self) -> int:
        return self._router.loads.tokens[self.index]

    @property
    def healthy(self) -> bool:
        return self._router.loads.open[self.index]

    @property
    def prefix_tokens(self) -> int:
        return self._group.cached_tokens(self._router.state)

    @property
    def items_seen(self) -> int:
        return self._router.seen[self.index]

    @property
    def measured(self) -> Measured:
        return self._group.measured

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in ReplicaView.__struct_fields__}
        return repr(ReplicaView(**values))


class Router(Restorable):
    """Chooses groups for requests.

    Attributes:
        state: The request that is routed.
        seen: Number of its items last sent to each replica.
        loads: Loads of all replicas.
        _routed: Requests that it has routed.
        _sent: The replica that each item was sent to last.
    """

    state: RequestState
    seen: Counter[int]
    _routed: Saved[int] = 0
    _sent: Saved[dict[bytes, int]]

    def __init__(
        self,
        seat: PolicySeat,
        limits: SchedulerLimits,
        groups: Sequence[GenerateGroup],
        measured: Measured,
        loads: Loads,
    ) -> None:
        self._seat = seat
        self._groups = groups
        self.loads = loads
        replicas = tuple(RoutedGroup(group.index, group, self) for group in groups)
        self._replicas = cast("tuple[ReplicaView, ...]", replicas)
        self._measured = measured
        self._limits = limits
        self._sent = {}

    def choose(self, state: RequestState, now_ns: int) -> GenerateGroup:
        """Return the group of a request: one that takes work, or else one that will be restarted."""
        groups, opened = self._groups, self.loads.refresh().open
        usable = [index for index, is_open in enumerate(opened) if is_open] or [
            group.index for group in groups if not group.retired
        ]
        chosen = groups[usable[0] if len(usable) == 1 else self._ask(state, usable, now_ns)]
        self._routed += 1
        if len(groups) > 1:
            self._remember(state, chosen.index)
        return chosen

    def _ask(self, state: RequestState, usable: Sequence[int], now_ns: int) -> int:
        keys = tuple([item.key for item in state.items])
        self.state = state
        self.seen = Counter(self._sent[key] for key in keys if key in self._sent)
        view = RoutingView(
            now_ns=now_ns,
            replicas=self._replicas,
            prompt_tokens=state.prompt_length,
            item_keys=keys,
            routed=self._routed,
            load_limit_tokens=min(self.loads.blocks) * self._limits.block_size,
            max_tokens=state.request.sampling.max_tokens,
            priority=state.request.priority,
            tenant=state.request.tenant,
            session=state.request.session,
            measured=self._measured,
            state=self._seat.state,
        )
        count, loads = len(self._groups), self.loads.tokens
        chosen: int = self._seat.decide(view, count, usable, loads)
        if self.loads.open[chosen] or chosen in usable:
            return chosen
        self._seat.overrule("the replica takes no requests")
        return default_replica(count, usable, loads)

    def _remember(self, state: RequestState, index: int) -> None:
        for item in state.items:
            self._sent.pop(item.key, None)  # it becomes the most recent
            self._sent[item.key] = index
        while len(self._sent) > ITEMS_MAX:
            del self._sent[next(iter(self._sent))]


class RequestMoves(Restorable):
    """Moves the requests of a table between the embedding cache and the generate groups.

    Attributes:
        ended_choices: Ended choices for which `release_prompts` has yet to be called.
        given_up: Why no request can be served any more; empty while some can.
    """

    _router: Saved[Router]
    given_up: Saved[str] = ""

    def __init__(
        self,
        limits: SchedulerLimits,
        table: RequestTable,
        cache: EmbeddingCache,
        groups: Sequence[GenerateGroup],
        seats: PolicySeats,
        measured: Measured,
        loads: Loads,
    ) -> None:
        self._limits = limits
        self._encoding = seats.add_seat("encode.encoding")
        self._table = table
        self._cache = cache
        self._groups = groups
        self._loads = loads
        self._router = Router(seats.add_seat("routing"), limits, groups, measured, loads)
        self.ended_choices: list[RequestState] = []

    def group_of(self, state: RequestState) -> GenerateGroup:
        """Return the group of a request."""
        return self._groups[state.replica]

    def requests_of(self, group: GenerateGroup, *phases: Phase) -> list[RequestState]:
        """Return the requests of a group, of all or some phases, oldest first."""
        return [
            state
            for state in self._table.live.values()
            if state.replica == group.index and (not phases or state.phase in phases)
        ]

    # --- arrivals ---

    def submit(self, event: Submitted, now_ns: int) -> list[Command]:
        """Accept and route a request with all its choices, or refuse it."""
        request = event.request
        requests = [request, *[_another(request, one) for one in event.further]]
        refusal = self._refuse(event, requests)
        if refusal is not None:
            refused, code = self._table.refused, refusal.code.value
            refused[code] = refused.get(code, 0) + 1
            return [refusal]
        table = self._table
        commands: list[Command] = []
        first, choices = table.arrivals + 1, len(requests)
        root = self._root(request, first, choices)
        for number, each in enumerate(requests, start=first):
            tokens = int32(each.prompt_token_ids) + int32(event.emitted if number == first else ())
            state = RequestState(
                request=each,
                number=number,
                order=(number, 0),
                stop_token_ids=event.stop_token_ids,
                tokens=tokens,
                host_bytes=host_bytes(each, items=number == first),  # the choices share the items
                root=root,
                first=first,
                choices=choices,
                submitted_ns=now_ns,
                uncached=len(tokens),
            )
            table.add(state)
            commands.append(Accept(each.request_id, number))
            commands += self._route(state, now_ns, arriving=True)
        return commands

    def _root(self, request: Request, first: int, choices: int) -> bytes | None:
        """Return the parent of a request's block hashes; without a prefix cache, only its choices share blocks."""
        if self._limits.prefix_cache:
            return root_hash(request.cache_salt, request.adapter)
        return choices_root(first) if choices > 1 and self._limits.shares_blocks else None

    def _refuse(self, event: Submitted, requests: Sequence[Request]) -> Refuse | None:
        request, emitted = event.request, len(event.emitted)
        if self.given_up:
            return Refuse(request.request_id, RefusalCode.GIVEN_UP, reason=self.given_up)
        refusal = refuse_impossible(request, self._limits, emitted=emitted)
        if refusal is None and any(self._table.find(one.request_id) for one in requests):
            refusal = Refuse(request.request_id, RefusalCode.DUPLICATE_ID)
        return refusal or self._refuse_full(request, len(requests))

    def _refuse_full(self, request: Request, choices: int) -> Refuse | None:
        """Return the refusal if too many requests would wait, or hold too many bytes; a single one may exceed both."""
        table, limits = self._table, self._limits
        waiting_bytes = table.live_bytes + host_bytes(request)
        if choices > 1:
            waiting_bytes += (choices - 1) * host_bytes(request, items=False)
        if len(table.live) + choices <= limits.waiting and waiting_bytes <= limits.waiting_bytes:
            return None  # independent of the number of running ones
        name, code = request.request_id, RefusalCode.QUEUE_FULL
        waiting = len(table.live) - self._loads.refresh().slots_total
        if waiting and waiting + choices > limits.waiting:
            return Refuse(name, code, waiting + choices, limits.waiting, "generate.max_waiting")
        if (
            waiting and waiting_bytes > limits.waiting_bytes
        ):  # then the bytes of running ones matter
            running = [state for group in self._groups for state in group.running]
            waiting_bytes -= sum(state.host_bytes for state in running)
            if waiting_bytes > limits.waiting_bytes:
                setting = "generate.max_waiting_bytes"
                return Refuse(name, code, waiting_bytes, limits.waiting_bytes, setting)
        return None

    def _route(
        self, state: RequestState, now_ns: int, *, arriving: bool = False
    ) -> Sequence[Command]:
        """Choose a group for a request, and enqueue it there."""
        state.extend_hashes(self._limits.block_size)
        first = self._table.live.get(state.first)
        if first is not None and first is not state and self.group_of(first).open:
            group = self.group_of(first)  # which computes the prompt
        else:
            group = self._router.choose(state, now_ns)
        state.replica = group.index
        group.add(state)
        self._loads.change(group.index)
        return self.enqueue(state, now_ns, arriving=arriving)

    # --- the way into the queue ---

    def enqueue(
        self, state: RequestState, now_ns: int, *, arriving: bool = False
    ) -> Sequence[Command]:
        """Claim the items of the next chunk; enqueue the request if that could run, else let it wait for them."""
        group = self.group_of(state)
        if not group.accepts(state) and any(other.ready for other in self._groups):
            self._suspend(state)
            return ()
        computed = group.cached_tokens(state)
        state.uncached = len(state.tokens) - computed
        if self._awaits_prompt(state):
            self.drop_claims(state)
            state.phase = PROMPT
            return ()
        state.phase = ITEMS
        self._cache.release_before(state, computed)
        ended = self.claim_items(state, computed, now_ns, arriving=arriving)
        if ended:
            return ended
        if group.can_start(state, computed):
            if not state.items_ready_ns:
                state.items_ready_ns = now_ns
            group.queue.enqueue(state)
        return ()

    def claim_items(
        self, state: RequestState, start: int, now_ns: int, *, arriving: bool = False
    ) -> Sequence[Command]:
        """Claim the items for the chunk at `start`, and those that the policy adds.

        If an image has another length than its cached embedding, the request ends: the terminal command is returned.
        """
        if not state.items or state.items[-1].end <= start:
            return ()
        stop, is_ready = state.reach(start, self._limits), self._cache.is_ready
        spans = [ItemSpan(item.offset, item.end, is_ready(item.key)) for item in state.items]
        view = EncodingView(
            now_ns=now_ns,
            items=tuple(spans),
            chunk_start=start,
            chunk_stop=stop,
            chunk_tokens=self._limits.chunk_tokens,
            prompt_tokens=len(state.tokens),
            arriving=arriving,
            priority=state.request.priority,
            target_ns=state.target_ns,
            tenant=state.request.tenant,
            session=state.request.session,
            measured=self.group_of(state).measured,
            state=self._encoding.state,
        )
        for index in self._choose_items(view, spans, start, stop):
            item = state.items[index]
            if index in state.wanted or item.end <= start:
                continue
            state.wanted.add(index)
            ready = self._cache.claim(state, index, now_ns)
            state.encoded_items += not ready
            if self._cache.entries[item.key].item.tokens != item.tokens:
                message = "the image's token count differs from its cached embedding's"
                return [self.fail_request(state, now_ns, message, code="length_mismatch")]
        return ()

    def _choose_items(
        self, view: EncodingView, spans: Sequence[ItemSpan], start: int, stop: int
    ) -> list[int]:
        """Return indices of the items to encode now: those that the chunk needs, and those that the policy adds."""
        # Before the call: the policy has the spans, and could change them by force.
        needed = {
            index: item.ready
            for index, item in enumerate(spans)
            if item.start < stop and item.stop > start
        }
        chosen: list[int] = self._encoding.decide(view, len(spans))
        if False in [ready or index in chosen for index, ready in needed.items()]:
            self._encoding.overrule("items that the chunk needs were left out")
        return sorted({*needed, *chosen})

    def _awaits_prompt(self, state: RequestState) -> bool:
        """Return True if a further choice waits until the first one has computed their prompt.

        Then all full blocks are cached, and it computes less than a block.
        """
        if state.first == state.number or not state.hashes or state.admitted_ns:
            return False
        first = self._table.live.get(state.first)
        return (
            first is not None
            and first.replica == state.replica
            and first.phase is not DECODE
            and state.uncached > self._limits.block_size
        )

    def after_chunk(self, state: RequestState, now_ns: int) -> Sequence[Command]:
        """Claim the items of the chunk after a decided one, or release the choices that waited for the prompt."""
        if state.phase is PREFILL:
            # While a chunk runs, the encoder works on the items of the next one.
            return self.claim_items(state, state.computed, now_ns)
        return self._release_prompt(state, now_ns)

    def _release_prompt(self, first: RequestState, now_ns: int) -> list[Command]:
        """Enqueue the choices that wait for the prompt of the first one, which is computed, or will not be."""
        commands: list[Command] = []
        if first.choices > 1 and first.first == first.number:
            for state in self._table.choices_with(first):
                if state.phase is PROMPT:
                    commands += self.enqueue(state, now_ns)
        return commands

    def release_prompts(self, now_ns: int) -> list[Command]:
        """Enqueue the choices whose first choice ended since the last call."""
        ended, self.ended_choices = self.ended_choices, []
        return [command for one in ended for command in self._release_prompt(one, now_ns)]

    def items_ready(self, numbers: Iterable[int], now_ns: int) -> list[Command]:
        """Enqueue requests whose items are encoded."""
        commands: list[Command] = []
        for state in self._table.get_all(numbers):
            if state.phase is ITEMS:
                commands += self.enqueue(state, now_ns)
            elif state.phase is PREFILL:
                self.group_of(state).mark_dirty()
        return commands

    # --- to another group ---

    def requeue(self, state: RequestState, now_ns: int) -> list[Command]:
        """Enqueue a preempted request again, in another group if its own takes no more requests."""
        group = self.group_of(state)
        commands = list(self.enqueue(state, now_ns))
        if not group.open:
            probe("moves.requeued_from_closed_group")
            commands += self.move_waiting(group, now_ns)
        return commands

    def move_waiting(self, group: GenerateGroup, now_ns: int) -> list[Command]:
        """Move the waiting requests of a closed group to other groups; suspend them if there is none.

        Those that ran there when it was lost stay, since one may have crashed it. A draining group serves them.
        """
        elsewhere = any(other.open for other in self._groups)
        running = any(other.ready for other in self._groups)
        commands: list[Command] = []
        waiting = (ITEMS, READY, SUSPENDED, PROMPT)
        for state in self.requests_of(group, *waiting):
            if group.accepts(state):
                probe("moves.kept_by_draining_group")
                continue
            if elsewhere and not state.losses:
                probe("moves.moved")
                commands += self.move(state, now_ns)
            elif running:
                probe("moves.suspended")
                self._suspend(state)
        return commands

    def move(self, state: RequestState, now_ns: int) -> Sequence[Command]:
        """Route a request without a slot to another group."""
        group = self.group_of(state)
        group.detach(state)
        self._loads.change(group.index)
        return self._route(state, now_ns)

    def _suspend(self, state: RequestState) -> None:
        """Let a request without a slot wait until its group is back.

        It drops its claims: as an older request, it would keep embeddings from those that can continue.
        """
        self.group_of(state).dequeue(state)
        self.drop_claims(state)
        state.phase = SUSPENDED

    # --- the end ---

    def finish_request(
        self,
        state: RequestState,
        reason: FinishReason,
        now_ns: int,
        *,
        message: str = "",
        code: str = "",
    ) -> Finish:
        """Free the resources of a request, and return its terminal command."""
        group = self.group_of(state)
        group.remove(state, now_ns)
        self._loads.change(group.index)
        group.measures.note_end(state, reason, now_ns)
        self.drop_claims(state)
        self._table.remove(state, reason)
        if state.choices > 1:
            self.ended_choices.append(state)
        times = RequestTimes(
            submitted_ns=state.submitted_ns,
            items_ready_ns=state.items_ready_ns,
            admitted_ns=state.admitted_ns,
            first_token_ns=state.first_token_ns,
            finished_ns=now_ns,
            cached_tokens=state.cached_tokens,
            encoded_items=state.encoded_items,
            preemptions=state.preemptions,
        )
        return Finish(state.request.request_id, state.number, reason, times, message, code)

    def fail_request(self, state: RequestState, now_ns: int, message: str, *, code: str) -> Finish:
        """End a request with an error."""
        return self.finish_request(state, FinishReason.ERROR, now_ns, message=message, code=code)

    def fail_all(
        self, numbers: Iterable[int], now_ns: int, message: str, *, code: str
    ) -> list[Command]:
        """End requests with an error."""
        return [
            self.fail_request(state, now_ns, message, code=code)
            for state in self._table.get_all(numbers)
        ]

    def clear(self, now_ns: int, message: str, *, code: str) -> list[Command]:
        """End all requests."""
        return [
            self.finish_request(state, FinishReason.ABORT, now_ns, message=message, code=code)
            for state in list(self._table.live.values())
        ]

    def give_up(self, reason: str, now_ns: int) -> list[Command]:
        """End all requests, and refuse new ones: no group is left to serve them."""
        self.given_up = reason
        return self.clear(now_ns, reason, code="given_up")

    def expire(self, now_ns: int) -> list[Command]:
        """End the requests that waited too long for their first step."""
        expiries, live = self._table.expiries, self._table.live
        expired: list[RequestState] = []
        while expiries and expiries[0][0] <= now_ns:
            state = live.get(expiries.popleft()[1])
            if state is not None and not state.admitted_ns:
                expired.append(state)
        if not expired:
            return []
        probe("moves.expired")
        waited_s = self._limits.waiting_ns / 1e9
        message = (
            f"the request waited for its first step for {waited_s:g} s, which is the limit "
            "(deadlines.waiting_s). Remedy: try again later, or raise the limit"
        )
        return [self.fail_request(state, now_ns, message, code="expired") for state in expired]

    def drop_claims(self, state: RequestState) -> None:
        """Drop all claims of a request."""
        for index in sorted(state.wanted):
            state.wanted.discard(index)
            self._cache.release_claim(state, index)

    def check(self) -> None:
        """Assert that choices that wait for the prompt of the first one will be released."""
        assert not self.ended_choices, "choices of an ended first one were not released"
        for state in self._table.live.values():
            if state.phase is PROMPT:
                assert self._awaits_prompt(state), f"choice {state.number} waits for no prompt"
                assert not state.wanted, "a choice that waits for a prompt claims embeddings"


def _another(request: Request, answer: FurtherChoice) -> Request:
    """Return a request with another id and seed; the first choice reports the log-probabilities of the prompt."""
    sampling = msgspec.structs.replace(request.sampling, seed=answer.seed, prompt_logprobs=None)
    return msgspec.structs.replace(request, request_id=answer.request_id, sampling=sampling)
