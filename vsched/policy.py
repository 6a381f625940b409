"""The policy contracts: base classes, the read-only views they get, the plain values they return.

A policy is a keyword-only frozen struct whose fields are its configuration. A built-in or a user's class subclasses one
of them, adds fields, and overrides one method. Policies do no I/O and hold no clock and no randomness: the view
carries `now_ns` and whatever history the decision needs. What a policy wants to remember from one call to the next is a
struct, its `state_type`: the kernel keeps it and lends it to each call as `view.state`. The kernel validates what a
policy proposes and enacts it; a proposal that is out of range, or a policy that raises, is counted and logged, and the
built-in default decides.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from vsched.measured import NOTHING_MEASURED, Measured
from vsched.memory_facts import Attempt as Attempt
from vsched.memory_facts import AttemptOutcome as AttemptOutcome
from vsched.memory_facts import RankMemory as RankMemory
from vsched.memory_facts import Reservation as Reservation
from vsched.policy_contracts.base import Count as Count
from vsched.policy_contracts.base import Fraction as Fraction
from vsched.policy_contracts.base import Policy as Policy
from vsched.policy_contracts.base import PositiveCount as PositiveCount
from vsched.policy_contracts.base import Seconds as Seconds
from vsched.policy_contracts.base import WaitingEntry as WaitingEntry
from vsched.policy_contracts.caches import Dispatch as Dispatch
from vsched.policy_contracts.caches import DispatchPolicy as DispatchPolicy
from vsched.policy_contracts.caches import DispatchView as DispatchView
from vsched.policy_contracts.caches import EncodeGroupView as EncodeGroupView
from vsched.policy_contracts.caches import EncodeReplica as EncodeReplica
from vsched.policy_contracts.caches import InsertionPolicy as InsertionPolicy
from vsched.policy_contracts.caches import InsertionView as InsertionView
from vsched.policy_contracts.caches import ReadyEmbedding as ReadyEmbedding
from vsched.policy_contracts.caches import ReclaimPolicy as ReclaimPolicy
from vsched.policy_contracts.caches import ReclaimView as ReclaimView
from vsched.views.front_door import ArrivalView as ArrivalView
from vsched.views.front_door import FrontDoorAnswer as FrontDoorAnswer
from vsched.views.front_door import FrontDoorView as FrontDoorView
from vsched.views.front_door import Hold as Hold
from vsched.views.front_door import LetIn as LetIn
from vsched.views.front_door import Redirect as Redirect
from vsched.views.front_door import Shed as Shed

# --- admission ---------------------------------------------------------------------------------------------------


class AdmissionView(msgspec.Struct, frozen=True, kw_only=True):
    """What an admission policy sees.

    Attributes:
        stage: `encode` or `generate`.
        waiting: Entries in queue order; the first is the front.
        tokens_free: Tokens that the step still has room for.
        entries_free: Slots or permits that are free: no more entries than this can join.
        blocks_free: KV blocks that are free or evictable; 0 in the encode stage.
        running: Entries already in progress in this stage.
        divisible: Whether an entry may join with a part of its tokens (chunked prefill).
        default_tokens: The stage's default token budget, derived from the generate stage's batch budget.
        measured: Times of the latest steps and requests: of this replica, or of all in the encode stage.
        state: What the policy remembers, to be changed in place; None for a policy without a state.
    """

    stage: str
    now_ns: int
    waiting: Sequence[WaitingEntry]
    tokens_free: int
    entries_free: int
    blocks_free: int
    running: int
    divisible: bool
    default_tokens: int
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class Admission(msgspec.Struct, frozen=True):
    """Indices into `view.waiting` that join now, in this order; or hold everything until a time.

    Nothing can be held for longer than a minute after its arrival.
    """

    indices: Sequence[int] = ()
    hold_until_ns: int | None = None


class AdmissionPolicy(Policy, frozen=True, kw_only=True):
    """Decides which waiting entries join the next step, or until when to hold."""

    kind: ClassVar[str] = "admission"
    method: ClassVar[str] = "admit"

    def admit(self, view: AdmissionView) -> Admission:
        """Return the entries that join the next step.

        The kernel takes them in the given order and stops before the first that does not fit; refused entries keep
        their places.
        """
        raise NotImplementedError


# --- encoding ----------------------------------------------------------------------------------------------------


class ItemSpan(msgspec.Struct, frozen=True):
    """Where an item lies in its prompt: [start, stop), and whether its embedding is ready."""

    start: int
    stop: int
    ready: bool


class EncodingView(msgspec.Struct, frozen=True, kw_only=True):
    """What an encoding policy sees of one request.

    `[chunk_start, chunk_stop)` is the prefill chunk that comes next; `arriving` is True when the request is new.
    `measured` is of the request's replica, and `state` what the policy remembers, to be changed in place.
    """

    items: Sequence[ItemSpan]
    chunk_start: int
    chunk_stop: int
    chunk_tokens: int
    prompt_tokens: int
    arriving: bool
    tenant: str = ""
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class EncodingPolicy(Policy, frozen=True, kw_only=True):
    """Decides which items of a request to encode now."""

    kind: ClassVar[str] = "encoding"
    method: ClassVar[str] = "select"
    scope: ClassVar[Literal["item", "request"]] = "item"
    """What shares a cache entry: `item`, equal images wherever they appear; `request`, only the very same set of
    images in the same order, so that an image more makes all of them new."""

    def select(self, view: EncodingView) -> Sequence[int]:
        """Return indices into `view.items` to encode now; those that the chunk needs are always added."""
        raise NotImplementedError


# --- eviction ----------------------------------------------------------------------------------------------------


Key = TypeVar("Key", bound=Hashable)


class EvictionOrder(Protocol[Key]):
    """The evictable entries of one cache, in the order that a policy wants them gone.

    Only entries that are not in use are in it, so whatever `victim` names may go at once.
    """

    def add(self, key: Key, size: int) -> bool:
        """Take an entry that has just become evictable; False drops it from the cache at once."""
        ...

    def reuse(self, key: Key) -> None:
        """Forget an entry because it is in use again (a hit)."""
        ...

    def drop(self, key: Key) -> None:
        """Forget an entry because it left the cache."""
        ...

    def victim(self) -> Key:
        """Name the next entry to go, without removing it; the order is not empty."""
        ...

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Key]: ...


@runtime_checkable
class RecordableOrder(Protocol):
    """What an eviction order adds so that a record of the server can be replayed.

    A server whose orders have not both methods serves, and records nothing.
    """

    def state(self) -> object:
        """Return what the order remembers as plain values: None, numbers, text, bytes, lists and dictionaries."""
        ...

    def restore(self, state: Any) -> None:
        """Take over what `state` returned; called on a fresh order. Tuples have become lists."""
        ...


class EvictionPolicy(Policy, frozen=True, kw_only=True):
    """Decides which cached embeddings or prefix blocks go."""

    kind: ClassVar[str] = "eviction"
    method: ClassVar[str] = "build_order"
    remembers: ClassVar[bool] = False  # its order does

    def build_order(self) -> EvictionOrder[Hashable]:
        """Return a fresh, empty order for one cache."""
        raise NotImplementedError


# --- memory ------------------------------------------------------------------------------------------------------


class MemoryView(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured in generate groups before their KV caches stand, which get one size.

    Attributes:
        ranks: Of all groups, measured after loading the weights; the measurements of an attempt are in the attempt.
        reservations: Of every encode rank, on whatever memory.
        attempts: Everything tried so far, oldest first.
        bytes_per_token: KV bytes of one token on one rank.
        tokens_min: The least that can be built: one block.
        context_tokens: The longest prompt and output together.
        batch_tokens: Most tokens of a step.
        slots: Most requests that run at a time.
        state_bytes: Bytes of the states of all slots, and of snapshots, on one rank, whatever the size of the KV cache
            that they stand beside; 0 for a model without.
    """

    ranks: Sequence[RankMemory]
    reservations: Sequence[Reservation]
    attempts: Sequence[Attempt]
    bytes_per_token: int
    block_size: int
    tokens_min: int
    context_tokens: int
    batch_tokens: int
    slots: int
    state_bytes: int = 0


class Probe(msgspec.Struct, frozen=True):
    """Build a KV cache of `tokens` tokens, do the profiling run, measure, and tear it down again."""

    tokens: int


class Build(msgspec.Struct, frozen=True):
    """Build a KV cache of `tokens` tokens, and do the profiling run on it while the headroom is held."""

    tokens: int
    profile: bool = True
    headroom_bytes: int = 0


class AcceptBuild(msgspec.Struct, frozen=True):
    """Serve with what the last attempt built."""


class Fail(msgspec.Struct, frozen=True):
    """Refuse to start; the message gives value, limit and remedy. `leak` says that memory did not come back."""

    message: str
    leak: bool = False


class MemoryPolicy(Policy, frozen=True, kw_only=True):
    """Decides the size of the KV cache from measurements and attempts."""

    api_version: ClassVar[int] = 2
    kind: ClassVar[str] = "memory"
    method: ClassVar[str] = "plan"
    remembers: ClassVar[bool] = False  # the view has every attempt

    mem_fraction: Fraction = 0.95
    """Share of the measured budget to use, in (0, 1]: the one safety margin."""

    def plan(self, view: MemoryView) -> Probe | Build | AcceptBuild | Fail:
        """Return what to try next, or how it ends; asked again with each attempt added, 16 times at most."""
        raise NotImplementedError


# --- routing -----------------------------------------------------------------------------------------------------


class Replica(Protocol):
    """One generate replica, as a request finds it. What nobody reads is not worked out.

    `load_tokens` is the prompt and output tokens of every request that it has: not yet pulled, waiting and running.
    `healthy` says whether it takes requests: up, and not draining. `prefix_tokens` at the front of the request's
    prompt are in its KV cache, and `items_seen` of the request's items were last sent there, as far as that is
    remembered. `measured` is what was measured there.
    """

    @property
    def index(self) -> int: ...
    @property
    def load_tokens(self) -> int: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def prefix_tokens(self) -> int: ...
    @property
    def items_seen(self) -> int: ...
    @property
    def measured(self) -> Measured: ...


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A `Replica` of plain values, for tests of policies."""

    index: int
    load_tokens: int
    healthy: bool
    prefix_tokens: int = 0
    items_seen: int = 0
    measured: Measured = NOTHING_MEASURED


class RoutingView(msgspec.Struct, frozen=True, kw_only=True):
    """What a routing policy sees: the replicas, the request, and how many requests were routed before it.

    `load_limit_tokens` is what one replica can run at once: the tokens of its KV cache. `measured` is of all
    replicas together, and `state` what the policy remembers, to be changed in place.
    """

    replicas: Sequence[Replica]
    prompt_tokens: int
    item_keys: Sequence[bytes]
    routed: int
    load_limit_tokens: int = 0
    tenant: str = ""
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class RoutingPolicy(Policy, frozen=True, kw_only=True):
    """Decides the replica of a request; asked again for a waiting request whose replica went down."""

    api_version: ClassVar[int] = 2
    kind: ClassVar[str] = "routing"
    method: ClassVar[str] = "choose"

    def choose(self, view: RoutingView) -> int:
        """Return an index into `view.replicas`."""
        raise NotImplementedError


# --- preemption --------------------------------------------------------------------------------------------------


class RunningView(msgspec.Struct, frozen=True, kw_only=True):
    """One running request: `tokens` computed so far, KV `blocks` held, `outputs` emitted; `tenant` is whose it is.

    Others hold `blocks_shared` of its blocks, too: to go on, it would neither compute nor copy those again. They are
    counted where there is a place to swap to, and 0 elsewhere.
    """

    tokens: int
    blocks: int
    outputs: int
    priority: int
    arrived_ns: int
    tenant: str = ""
    blocks_shared: int = 0


class PreemptionView(msgspec.Struct, frozen=True, kw_only=True):
    """The running requests, oldest first, when KV blocks ran out.

    `swap_blocks_free` is how many blocks could be swapped out now, 0 where nothing is set aside for it. A block has
    `block_tokens` tokens. `measured` is of this replica, and `state` what the policy remembers, to be changed in place.
    """

    now_ns: int
    running: Sequence[RunningView]
    swap_blocks_free: int = 0
    block_tokens: int = 16
    measured: Measured = NOTHING_MEASURED
    state: Any = None


Manner = Literal["recompute", "swap"]


class Preemption(msgspec.Struct, frozen=True):
    """Which request gives way, as an index into `view.running`, and how it comes back.

    `recompute`: its KV is computed again, but for what the prefix cache still has. `swap`: its blocks are copied to
    host memory now, and back when it goes on; where there is no room for them, it is recomputed.
    """

    victim: int
    manner: Manner = "recompute"


class PreemptionPolicy(Policy, frozen=True, kw_only=True):
    """Decides the victim when KV blocks run out, and how it comes back."""

    kind: ClassVar[str] = "preemption"
    method: ClassVar[str] = "victim"

    def victim(self, view: PreemptionView) -> int | Preemption:
        """Return an index into `view.running`; in a `Preemption`, to say more than that it is recomputed."""
        raise NotImplementedError


# --- drafting ----------------------------------------------------------------------------------------------------


DRAFT_TOKENS_MAX = 32
"""Most tokens that may be drafted for one request in one step."""


class Draft(msgspec.Struct, frozen=True):
    """What ranks may draft for one request, from now on.

    Drafted tokens are verified, not trusted: with and without them a request gets the same tokens.

    Attributes:
        tokens: At most so many in a step; 0 for none.
        steps: For so many steps of the group; then the policy is asked again. 0: until the request leaves its slot.
        ngram: What follows an earlier place with the same last tokens, at least so many, is drafted (prompt lookup); 0
            for no lookup. What a grammar leaves no choice about is drafted in any case.
        model: Whether the draft model is asked where there is nothing else to draft. Ranks without one draft nothing
            more for it.
    """

    tokens: int = 0
    steps: int = 0
    ngram: int = 0
    model: bool = False


class DraftingView(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafting policy sees of one decoding request: when it begins to decode, and when its grant is over.

    Attributes:
        held: Whether its answer is held to a grammar.
        outputs: Tokens that it has yielded, as far as known.
        outputs_max: Tokens that it may yield in all.
        running: Requests that hold a slot.
        rows_free: Tokens that a step can take beside those of running requests and of grants: slots that are free.
        last: The grant that is over; None where it begins to decode.
        drafted: Tokens drafted for it under that grant, as far as known.
        accepted: Those of them that it was given.
        model: Whether ranks have a draft model.
        tenant: Whose the request is.
        measured: Times of this replica.
        state: What the policy remembers, to be changed in place.
    """

    now_ns: int
    held: bool
    outputs: int
    outputs_max: int
    running: int
    rows_free: int
    last: Draft | None = None
    drafted: int = 0
    accepted: int = 0
    model: bool = False
    tenant: str = ""
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class DraftingPolicy(Policy, frozen=True, kw_only=True):
    """Decides how many tokens may be drafted for a request, and for how long."""

    kind: ClassVar[str] = "drafting"
    method: ClassVar[str] = "grant"

    def grant(self, view: DraftingView) -> Draft:
        """Return what may be drafted for the request; the kernel cuts it to `rows_free`."""
        raise NotImplementedError


# --- step --------------------------------------------------------------------------------------------------------


class PrefillView(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is being prefilled.

    Attributes:
        tokens: Prompt tokens still to be computed.
        computed: Tokens before them, which attention looks back at.
        arrived_ns: When it was submitted.
        joined_ns: When it first got a slot.
        target_ns: When its first token is due; None without a target.
        session: The conversation that it is a turn of; empty where nobody says.
    """

    tokens: int
    computed: int
    priority: int
    arrived_ns: int
    joined_ns: int
    target_ns: int | None = None
    tenant: str = ""
    session: str = ""


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """What a step policy sees of a step that can prefill.

    Attributes:
        prefilling: The requests that can be prefilled now, oldest first; those that wait for an embedding are not here.
        waiting: Requests that wait for a slot; what the step has left is theirs.
        decodes: Requests that decode beside, and wait for the step.
        tokens_free: Tokens that the step has room for.
        time_ns: How long prefill may take in it by the configuration (`generate.step_target_ms` and its ratio); None
            for any time, as where nobody decodes.
        decode_ns: What the decodes should take by themselves, as learned; 0 before anything was.
        token_ns: What a prompt token should take, as learned, and `pair_ns` a pair of one and a token before it.
        measured: Times of this replica.
        state: What the policy remembers, to be changed in place.
    """

    now_ns: int
    prefilling: Sequence[PrefillView]
    waiting: int
    decodes: int
    tokens_free: int
    time_ns: int | None = None
    decode_ns: float = 0.0
    token_ns: float = 0.0
    pair_ns: float = 0.0
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class StepShares(msgspec.Struct, frozen=True):
    """Who advances in a step, in which order, and by how much.

    Attributes:
        order: Indices into `view.prefilling`; who is not in it does not advance.
        tokens: The most tokens of each of them, in the same order; None for as many as fit.
        time_ns: How long prefill may take in this step, in place of `view.time_ns`; None for that. Not heeded where
            nobody decodes.
    """

    order: Sequence[int]
    tokens: Sequence[int] | None = None
    time_ns: int | None = None


class StepPolicy(Policy, frozen=True, kw_only=True):
    """Decides which prefilling requests advance in a step, and by how many tokens."""

    kind: ClassVar[str] = "step"
    method: ClassVar[str] = "share"

    def share(self, view: StepView) -> StepShares:
        """Return who advances; asked for every step in which a request can be prefilled, or join while others decode.

        Each gets a chunk of what fits: of its tokens, of the room and the time left, and of what embeddings are ready.
        Nobody is left out for over a minute, and where nobody else would do anything, all advance in order.
        """
        raise NotImplementedError


# --- front door --------------------------------------------------------------------------------------------------


class FrontDoorPolicy(Policy, frozen=True, kw_only=True):
    """Decides whether a request comes in, before anything is done for it."""

    kind: ClassVar[str] = "front_door"
    method: ClassVar[str] = "receive"

    def receive(self, view: FrontDoorView) -> FrontDoorAnswer:
        """Return `LetIn`, `Hold`, `Shed` or `Redirect`; asked again at the end of each hold."""
        raise NotImplementedError


CONTRACTS: dict[str, type[Policy]] = {
    base.kind: base
    for base in (
        AdmissionPolicy,
        EncodingPolicy,
        EvictionPolicy,
        MemoryPolicy,
        RoutingPolicy,
        PreemptionPolicy,
        DraftingPolicy,
        StepPolicy,
        FrontDoorPolicy,
        DispatchPolicy,
        ReclaimPolicy,
        InsertionPolicy,
    )
}
