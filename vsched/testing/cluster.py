"""A scheduler with the ranks of the simulated engine, of which the caller chooses what completes next.

There is no shell, no network and no time in between, so a random schedule reaches orders that
simulated engines do not. The ranks check everything they read; see `vsched.sim.ranks.stepped`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any

import msgspec

from vsched.config import Config
from vsched.config.policies import policy_table
from vsched.errors import PolicyError
from vsched.failures import EncodeErrorKind, LostTooOften, Simulated
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.commands import (
    Accept,
    AdmitArrival,
    Command,
    Decide,
    Drained,
    EmitTokens,
    Finish,
    Notice,
    Refuse,
    RejectArrival,
    RestartGroup,
    SetTimer,
)
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.kernel.events import (
    Aborted,
    Arrived,
    Cleared,
    Drain,
    Encoded,
    EncodeFailed,
    Event,
    FurtherChoice,
    GroupLost,
    GroupReady,
    GroupRetired,
    Resume,
    Submitted,
    TimerFired,
    Withdrawn,
)
from vsched.plugins import check_contract, resolve_policy
from vsched.policy import (
    KERNEL_TABLES,
    POLICY_TABLES,
    SEVERAL,
    Policy,
    decisions_of,
    tables_of,
)
from vsched.policy_host import SeatPolicies
from vsched.sim.ranks.stepped import (
    SteppedArena,
    SteppedGenerator,
    correct_outputs,
    symbolic_rank,
)
from vsched.types import (
    Extent,
    FinishReason,
    MediaItem,
    Request,
    SamplingParams,
    group_names,
    stage_of,
)
from vsched.worker.generate_rank import GenerateRank

_ENDS = [table.rpartition(".")[2] for table in POLICY_TABLES]
SEATS = {
    table.replace(".", "_") if _ENDS.count(end) > 1 else end: table
    for table, end in zip(POLICY_TABLES, _ENDS, strict=True)
    if table in KERNEL_TABLES
}
"""Tables of the policies that the kernel calls, by short names, such as `preemption` and `encode_admission`."""


def default_policies(policy: Policy | None = None, /, **changes: Policy) -> SeatPolicies:
    """Return the default policies of a server, with replacements by the names in `SEATS`.

    A positional `policy` makes all decisions that it has methods for, with one state if there are several.

    Raises:
        PolicyError: When the policy does not meet its contract.
    """
    by_table: dict[str, Policy] = {table: _default_of(table) for table in SEATS.values()}
    several = None
    if policy is not None:
        check_contract(type(policy), SEVERAL)
        by_table |= dict.fromkeys(tables_of(type(policy)), policy)
        several = policy if len(decisions_of(type(policy))) > 1 else None
    by_table |= {SEATS[name]: one for name, one in changes.items()}
    return SeatPolicies(by_table=by_table, several=several, build=resolve_policy)


def seats_of(decision: str) -> list[str]:
    """Return the names in `SEATS` for a decision."""
    return [name for name, table in SEATS.items() if POLICY_TABLES[table] == decision]


@cache
def _default_of(table: str) -> Policy:
    """Return the default policy of a table; requests take turns between replicas."""
    fields: dict[str, Any] = policy_table(Config(), table)
    if table == "routing":
        fields = {"use": "round-robin"}
    return resolve_policy(POLICY_TABLES[table], fields)


TICK_NS = 1000
HOLD_MAX_NS = 300 * 1_000_000_000
"""Policies that hold everything for five minutes, with no other activity, count as stuck."""


class ModelCluster:
    """A scheduler with groups of ranks; the caller chooses what completes next.

    The kernel's `check_invariants` runs after every event, and everything that a rank reads is
    checked.
    """

    def __init__(self, limits: SchedulerLimits, policies: SeatPolicies | None = None) -> None:
        policies = policies or default_policies()
        self.limits = limits
        self.kernel = Scheduler(limits, policies)
        self.now_ns = 0
        self.timers: list[int] = []
        self.arena = self.make_arena()
        self.requests: dict[str, Request] = {}
        self.names: dict[int, str] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Finish] = {}
        self.refused: dict[str, Refuse] = {}
        self.at_gate: dict[int, Submitted] = {}
        self.rejected: list[RejectArrival] = []
        self.encoded: list[list[bytes]] = []
        self.decisions: list[GenerateDecision] = []
        self.restarts: list[str] = []
        self.notices: list[str] = []
        self.down: set[str] = set()
        self.retired: set[str] = set()
        self.drained: list[str] = []
        self.faults = 0
        self._arrivals = 0
        self._entering: deque[Submitted] = deque()
        self.encode_logs: dict[str, deque[EncodeDecision]] = {
            name: deque() for name in group_names("encode", limits.encoders)
        }
        self.generators = {
            name: SteppedGenerator(name, limits, self.make_rank, self._request_of)
            for name in group_names("generate", limits.generators)
        }
        self.groups = [*self.encode_logs, *self.generators]
        for group in self.groups:
            self.send(GroupReady(group))

    def make_arena(self) -> SteppedArena:
        """Return the embeddings of all images."""
        return SteppedArena(self.limits)

    def make_rank(self, group: SteppedGenerator) -> GenerateRank:
        """Return an empty rank of a generate group."""
        return symbolic_rank(group, self.limits, self.arena, self._request_of)

    def _request_of(self, number: int) -> Request:
        return self.requests[self.names[number]]

    # --- events in, commands out ---

    def send(self, event: Event) -> list[Command]:
        """Pass an event to the kernel, execute the commands, check invariants, and fire due timers."""
        self.now_ns += TICK_NS
        commands = self._handle(event)
        self._ring()
        while self._entering:
            self.hand_in(self._entering.popleft())
        return commands

    def submit(self, request: Request, *, choices: int = 1) -> list[Command]:
        """Submit a request; further choices have its name with suffix `#1`, `#2`, and so on."""
        return self.hand_in(_submission(request, choices))

    def hand_in(self, event: Submitted) -> list[Command]:
        """Submit the request in an event."""
        request, further = event.request, event.further
        name = request.request_id
        for each in (name, *(one.request_id for one in further)):
            self.requests[each] = msgspec.structs.replace(request, request_id=each)
        commands = self.send(event)
        if name in self.refused:
            for one in further:
                del self.requests[one.request_id]
        return commands

    def arrive(self, request: Request, *, choices: int = 1) -> int:
        """Announce a request to the arrival policy, and submit it once it is admitted; return its arrival number."""
        self._arrivals += 1
        self.at_gate[self._arrivals] = _submission(request, choices, arrival_id=self._arrivals)
        self.send(
            Arrived(
                self._arrivals,
                request.tenant,
                request.priority,
                request.ttft_target_ms,
                images=len(request.items),
                choices=choices,
                outputs_max=request.sampling.max_tokens,
                session=request.session,
            )
        )
        return self._arrivals

    def withdraw(self, arrival_id: int) -> None:
        """Withdraw a request on arrival or in preparation, as a leaving client does."""
        self.send(Withdrawn(arrival_id))
        self.at_gate.pop(arrival_id, None)

    def abort(self, name: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort a request."""
        self.send(Aborted(name, reason))

    def wait(self, duration_ns: int) -> None:
        """Advance time, and fire timers on the way."""
        until_ns = self.now_ns + duration_ns
        while self.timers and self.timers[0] <= until_ns:
            self.now_ns = max(self.now_ns, self.timers[0])
            self._ring()
        self.now_ns = until_ns
        while self._entering:
            self.hand_in(self._entering.popleft())

    def _ring(self) -> None:
        while self.timers and self.timers[0] <= self.now_ns:
            heappop(self.timers)
            self._handle(TimerFired())

    def _handle(self, event: Event) -> list[Command]:
        commands = self.kernel.handle(event, self.now_ns)
        for command in commands:
            self.carry_out(command)
        self.kernel.check_invariants()
        return commands

    def carry_out(self, command: Command) -> None:
        """Execute a command."""
        match command:
            case Decide(group, decision):
                gone = group in self.down or group in self.retired
                assert not gone, "a decision for a group that is down"
                if isinstance(decision, EncodeDecision):
                    self.encode_logs[group].append(decision)
                    self.encoded.append([task.key for task in decision.tasks])
                else:
                    self.generators[group].log.append(decision)
                    self.decisions.append(decision)
            case AdmitArrival() | RejectArrival():
                self._answer_arrival(command)
            case Accept(request_id, number):
                self.names[number] = request_id
                self.outputs[request_id] = []
            case Finish(request_id):
                assert request_id not in self.ended, "two terminal replies"
                self.ended[request_id] = command
            case Refuse(request_id):
                assert request_id not in self.ended, "a refusal after a terminal reply"
                self.refused[request_id] = command
            case SetTimer(deadline_ns):
                assert deadline_ns > self.now_ns, "a timer in the past: it would spin"
                heappush(self.timers, deadline_ns)
            case RestartGroup(group):
                self.restarts.append(group)
            case Notice(message):
                self.notices.append(message)
            case Drained(group):
                self.drained.append(group)
            case EmitTokens():
                pass  # the outputs are recorded when they are sampled

    def _answer_arrival(self, command: AdmitArrival | RejectArrival) -> None:
        event = self.at_gate.pop(command.arrival_id)
        if isinstance(command, AdmitArrival):
            self._entering.append(event)
        else:
            self.rejected.append(command)

    # --- groups ---

    def busy(self, stage: str) -> list[str]:
        """Return the groups of a stage with pending steps."""
        if stage == "encode":
            return [name for name, log in self.encode_logs.items() if log]
        return [name for name, one in self.generators.items() if one.log]

    def run_encode(self, group: str = "", *, fail: EncodeErrorKind | None = None) -> None:
        """Execute the pending step of an encode group, by default the first busy one, or make it fail."""
        group = group or self.busy("encode")[0]
        decision = self.encode_logs[group].popleft()
        if fail:
            self.faults += 1
            self.send(EncodeFailed(decision.step, fail, group))
            return
        for task in decision.tasks:
            assert len(task.pages) == self.limits.pages_for(task.tokens)
            self.arena.encode(task)
        self.send(Encoded(decision.step, group))

    def run_generate(self, group: str = "") -> None:
        """Execute the oldest pending step of a generate group, by default the first busy one."""
        result, sampled = self.generators[group or self.busy("generate")[0]].step()
        for number, token in sampled:
            name = self.names[number]
            if name not in self.ended:
                self.outputs[name].append(token)
        self.send(result)

    # --- faults ---

    def lose(self, group: str, *, planned: bool = False) -> None:
        """Lose a group with everything in flight."""
        self.faults += 1
        self.down.add(group)
        if stage_of(group) == "encode":
            self.encode_logs[group].clear()
        else:
            self.generators[group].restart_rank()
        self.send(GroupLost(group, Simulated((group,)), planned))

    def restore_group(self, group: str, blocks: int = 0) -> None:
        """Bring a lost group back, with fewer KV blocks if `blocks` says so."""
        self.down.discard(group)
        self.send(GroupReady(group, blocks))

    def others(self, group: str) -> list[str]:
        """Return the other groups of the same stage that are not retired."""
        stage = stage_of(group)
        return [
            one
            for one in self.groups
            if one != group and stage_of(one) == stage and one not in self.retired
        ]

    def retire(self, group: str) -> None:
        """Retire a lost group."""
        self.down.discard(group)
        self.retired.add(group)
        self.send(GroupRetired(group, LostTooOften((group,))))

    # --- settling ---

    def drain(self, *, steps_max: int = 100_000) -> None:
        """Execute all pending steps and timers until nothing is left to do."""
        moved_ns = self.now_ns
        for _ in range(steps_max):
            if self.busy("encode") or self.busy("generate"):
                self.run_encode() if self.busy("encode") else self.run_generate()
                moved_ns = self.now_ns
            elif self.timers:
                self.wait(max(self.timers[0] - self.now_ns, 0))
                assert self.now_ns - moved_ns < HOLD_MAX_NS, f"held for ever: {self.unserved()}"
            else:
                return
        raise AssertionError(f"no end after {steps_max} steps: {self.unserved()}")

    def unserved(self) -> list[str]:
        """Explain each request without a terminal reply."""
        missing = self.requests.keys() - self.ended.keys() - self.refused.keys()
        return [f"{name}: {self.kernel.explain(name)}" for name in sorted(missing)]

    def check_policies(self) -> None:
        """Raise the first failure of a policy, with the traceback of each failure as a note.

        Raises:
            PolicyError: When a call raised or returned an invalid answer.
        """
        faults = [notice for notice in self.notices if notice.startswith("policy ")]
        if faults:
            error = PolicyError(faults[0])
            for trace in self.kernel.policy_failures.values():
                error.add_note("".join(trace.format()).rstrip())
            raise error

    def check_settled(self) -> None:
        """Assert that every request was served correctly or refused, and that nothing is held."""
        assert not self.at_gate, f"neither admitted nor rejected: {list(self.at_gate)}"
        assert not self.unserved(), f"no terminal reply: {self.unserved()}"
        for name, request in self.requests.items():
            finish = self.ended.get(name)
            if finish is None:
                continue
            expected = correct_outputs(request)
            if finish.reason is not FinishReason.LENGTH:
                expected = expected[: len(self.outputs[name])]
            assert self.outputs[name] == expected, f"{name}: wrong outputs"
            if finish.reason is FinishReason.ERROR:
                explained = self.faults or finish.code in ("length_mismatch", "expired")
                assert explained, f"{name} failed without a fault: {finish.message}"
        kernel = self.kernel
        for stage in kernel.generators:
            assert stage.statistics()["blocks_held"] == 0, "leaked KV blocks"
            assert stage.statistics()["swap_blocks_held"] == 0, "leaked host memory"
            assert stage.slots_held == 0, "a leaked slot"
            assert stage.load_tokens == 0, "load is counted for no request"
        assert not kernel.embeddings.queue, "an image waits for no request"
        for entry in kernel.embeddings:
            assert not entry.claims, "an embedding is claimed by no request"
            assert not entry.pins, "an embedding is pinned by no step"


def _submission(request: Request, choices: int, *, arrival_id: int = 0) -> Submitted:
    name = request.request_id
    further = tuple(FurtherChoice(f"{name}#{one}", one) for one in range(1, choices))
    return Submitted(request, further=further, arrival_id=arrival_id)


PLACEHOLDER = 5
SEPARATOR = 6
"""Follows each row of an image with rows."""
IMAGES = 6
"""Number of images shared by random requests: few enough for hits, preemptions and evictions."""

_NO_ROWS: Mapping[bytes, int] = MappingProxyType({})


def make_request(
    name: str,
    text: Sequence[int],
    items: Sequence[tuple[int, int, bytes]] = (),
    *,
    max_tokens: int = 4,
    encoded: Sequence[bytes] = (),
    row_tokens: Mapping[bytes, int] = _NO_ROWS,
    strides: Mapping[bytes, int] = _NO_ROWS,
    halved: Sequence[bytes] = (),
    priority: int = 0,
    ttft_target_ms: int | None = None,
    cache_salt: str = "",
    adapter: int = 0,
) -> Request:
    """Return a request of `text` with images inserted.

    Args:
        name: The request's id.
        text: Token ids of the text.
        items: Index in the text, tokens and key of each image.
        max_tokens: Number of tokens to generate.
        encoded: Keys of the images that are given as embeddings.
        row_tokens: Placeholders per row of an image, by key, each followed by a separator; other
            images have none.
        strides: Of these images, by key, only every such row has a placeholder.
        halved: Keys of the images of which only the second half has bidirectional attention.
        priority: As in `Request`.
        ttft_target_ms: As in `Request`.
        cache_salt: As in `Request`.
        adapter: As in `Request`.
    """
    tokens: list[int] = []
    placed: list[MediaItem] = []
    position = 0
    for index, count, key in items:
        tokens += text[position:index]
        position = index
        offset = len(tokens)
        spans: list[tuple[int, int]] = []
        width = row_tokens.get(key, count) or 1
        kept: list[tuple[int, int]] = []
        if (stride := strides.get(key, 1)) > 1:
            kept = [(row, row + 1) for row in range(0, count, stride)]
        for left in range(len(kept) or count, 0, -width):
            if spans:
                tokens.append(SEPARATOR)
            spans.append((len(tokens), len(tokens) + min(width, left)))
            tokens += [PLACEHOLDER] * min(width, left)
        placed.append(
            MediaItem(
                key=key,
                tokens=count,
                offset=offset,
                metadata=count.to_bytes(4, "little"),
                extent=Extent(0, 16),
                encoded=key in encoded,
                spans=tuple(spans) if len(spans) > 1 or kept else (),
                kept=tuple(kept),
                attention=((offset + count // 2, offset + count),) if key in halved else None,
            )
        )
    tokens += text[position:]
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        items=tuple(placed),
        sampling=SamplingParams(max_tokens=max_tokens),
        priority=priority,
        ttft_target_ms=ttft_target_ms,
        cache_salt=cache_salt,
        adapter=adapter,
    )


def random_request(rng: random.Random, name: str) -> Request:
    """Return a request with a random text (often a shared prefix) and some images from a small set.

    Some images are given as embeddings; some requests have a tenant, a session, a priority, a target, a cache salt or
    an adapter.
    """
    text = [(7 * index) % 50 + 10 for index in range(rng.randint(1, 60))]
    if rng.random() < 0.5:
        text = [rng.randint(10, 60) for _ in text]
    salt = rng.choice(["", "", "", "tenant"])
    count = rng.choice([0, 0, 1, 1, 2, 4])
    places = sorted(rng.choice([0, 1, rng.randint(0, len(text))]) for _ in range(count))
    items = []
    for place in places:
        image = rng.randrange(IMAGES)
        key = f"image{image}{salt}".encode()
        # Two images of each size: their prompts differ only in the keys.
        tokens = 1 + (image // 2 * 11) % 30
        # Sometimes the length differs for the same key: such a request may fail, but must not
        # affect others.
        items.append((place, tokens + (rng.random() < 0.02), key))
    request = make_request(
        name,
        text,
        items,
        max_tokens=rng.randint(1, 30),
        encoded=(f"image0{salt}".encode(), f"image3{salt}".encode()),
        row_tokens={f"image2{salt}".encode(): 5, f"image5{salt}".encode(): 1},
        strides={f"image4{salt}".encode(): 1 + sum(text) % 3},
        halved=(f"image3{salt}".encode(),),
        priority=rng.choice([0, 0, 0, 1, 5, -1]),
        ttft_target_ms=rng.choice([None, None, 0, 1, 100]),
        cache_salt=salt,
        adapter=(0, 0, 1, 2)[sum(text) % 4],
    )
    return msgspec.structs.replace(
        request,
        tenant=("", "", "one", "two")[len(text) % 4],
        session=("", "talk", "another")[len(text) % 3],
    )


def random_limits(rng: random.Random) -> SchedulerLimits:
    """Return limits in which some resource is usually scarce."""
    slots = rng.randint(1, 6)
    encoders, generators = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
    drawn = SchedulerLimits(
        block_size=rng.choice([1, 2, 4, 16]),
        blocks=rng.randint(12, 120),
        slots=slots,
        batch_tokens=slots + rng.randint(1, 60),
        chunk_tokens=rng.randint(1, 40),
        step_target_ns=rng.choice([0, 0, 1, 200, 5_000]),
        context_tokens=rng.randint(40, 400),
        page_rows=rng.choice([1, 4, 8]),
        pages=rng.randint(4, 40),
        encode_items=rng.randint(1, 4),
        waiting=rng.randint(5, 50),
        waiting_bytes=rng.choice([1 << 30, 1 << 30, 1000]),
        prefix_cache=rng.random() < 0.7,
        generate_depth=rng.choice([1, 2, 2, 3]),
        waiting_ns=rng.choice([0, 0, 0, 20_000_000]),
        encoders=encoders,
        generators=generators,
        encode_pauses=encoders == generators and rng.random() < 0.5,
    )
    # Every third model has a recurrent state; derived from earlier draws, so that seeds of other
    # models do not change.
    keeps_state = drawn.blocks % 3 == 0
    places = drawn.blocks % 7 if drawn.prefix_cache else 0
    # Every fourth model has bidirectional attention spans; in half of them the span is the whole
    # prompt.
    sees_ahead = drawn.waiting % 4 == 0
    prompt_atomic = sees_ahead and drawn.pages % 2 == 0
    return msgspec.structs.replace(
        drawn,
        item_atomic=sees_ahead,
        prompt_atomic=prompt_atomic,
        batch_tokens=drawn.batch_tokens + (60 if sees_ahead else 0),
        prefill_target_ns=(0, 1, 3_000)[drawn.waiting % 3],
        state_snapshots=places if keeps_state else None,
        drafts=not keeps_state,
        # Half of the models that can swap have swap memory, often too little.
        swap_blocks=0 if keeps_state or drawn.blocks % 2 else drawn.blocks * (drawn.waiting % 3),
        prefix_cache=drawn.prefix_cache and not (keeps_state and not places) and not prompt_atomic,
    )


_ANSWERS = (1, 1, 2, 1, 1, 1, 5, 1, 3)
_TELLING = 4
"""One in this many requests asks for prompt log-probabilities."""
_GATED = 2
"""One in this many requests passes the arrival policy; one in `_LEAVING` of these withdraws if it is held."""
_LEAVING = 8


def _draw_weights(rng: random.Random, *, faults: bool) -> dict[str, int]:
    """Draw the frequencies of actions in one run; they differ between runs: rare combinations need extreme weights."""
    return {
        "submit": rng.choice([2, 10, 30]),
        "encode": rng.choice([3, 20, 20]),
        "generate": rng.choice([3, 40, 40]),
        "wait": rng.choice([0, 2, 20]),
        "abort": rng.choice([0, 2, 10]),
        "fail": rng.choice([0, 1, 5]) if faults else 0,
        "lose": rng.choice([0, 1, 5]) if faults else 0,
        "restore": rng.choice([5, 30]),
        "retire": rng.choice([0, 0, 1]) if faults else 0,
        "drain": rng.choice([0, 0, 2]),
        "resume": rng.choice([2, 10]),
        "clear": rng.choice([0, 0, 1]),
    }


def run_random(
    rng: random.Random,
    policies: SeatPolicies | None = None,
    *,
    limits: SchedulerLimits | None = None,
    events: int = 80,
    faults: bool = True,
    make: Callable[[SchedulerLimits, SeatPolicies | None], ModelCluster] = ModelCluster,
) -> ModelCluster:
    """Run a random schedule, restore lost groups, drain and check; return the cluster for further checks.

    Raises:
        AssertionError: When something was lost, wrong, held too long or stuck.
    """
    cluster = make(limits or random_limits(rng), policies)
    weights = _draw_weights(rng, faults=faults)
    names = list(weights)
    for index in range(events):
        _act(rng.choices(names, list(weights.values()))[0], index, cluster, rng)
    for group in sorted(cluster.down):
        cluster.restore_group(group)
    for group in cluster.groups:
        if group not in cluster.retired:
            cluster.send(Resume(group))
    cluster.drain()
    cluster.check_settled()
    return cluster


def _act(action: str, index: int, cluster: ModelCluster, rng: random.Random) -> None:
    match action:
        case "submit":
            # Chosen by index rather than drawn, so that seeds give the same requests as before `n`
            # was supported.
            request = random_request(rng, f"r{index}")
            if index % _TELLING == 0:
                reported = msgspec.structs.replace(request.sampling, prompt_logprobs=0)
                request = msgspec.structs.replace(request, sampling=reported)
            choices = _ANSWERS[index % len(_ANSWERS)]
            if index % _GATED:
                cluster.submit(request, choices=choices)
            else:
                arrival_id = cluster.arrive(request, choices=choices)
                if index % (_GATED * _LEAVING) == 0:
                    cluster.withdraw(arrival_id)
        case "encode" if cluster.busy("encode"):
            cluster.run_encode(rng.choice(cluster.busy("encode")))
        case "generate" if cluster.busy("generate"):
            cluster.run_generate(rng.choice(cluster.busy("generate")))
        case "wait":
            cluster.wait(rng.choice([1_000, 100_000, 10_000_000, 1_000_000_000]))
        case "abort" if cluster.requests:
            # Includes requests that have ended: a client's abort may come late.
            name = rng.choice(sorted(cluster.requests))
            cluster.abort(name, rng.choice([FinishReason.ABORT, FinishReason.STOP]))
        case "clear":
            for arrival_id in list(cluster.at_gate):
                cluster.withdraw(arrival_id)  # as the shell interrupts them
            cluster.send(Cleared())
            waiting = cluster.kernel.statistics()["waiting"]
            assert waiting == 0, f"{waiting} requests wait after everything was cleared"
        case _:
            _happen(action, cluster, rng)


def _happen(action: str, cluster: ModelCluster, rng: random.Random) -> None:
    """Apply a fault or an operator action to a group."""
    group = rng.choice(cluster.groups)
    up = group not in cluster.down | cluster.retired
    match action:
        case "fail" if cluster.busy("encode"):
            group = rng.choice(cluster.busy("encode"))
            cluster.run_encode(group, fail=EncodeErrorKind.FAILED)
        case "lose" if up:
            cluster.lose(group)
        case "retire" if cluster.down:
            group = min(cluster.down)
            if cluster.others(group):
                cluster.retire(group)
        case "drain" if up:
            cluster.send(Drain(group))
        case "resume" if up:
            cluster.send(Resume(group))
        case "restore" if cluster.down:
            blocks = cluster.limits.blocks_min if cluster.faults % 3 == 0 else 0
            cluster.restore_group(min(cluster.down), blocks)
