"""Policies about requests: arrival, admission, the shares of a step, and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from vsched.policy.base import Policy, WaitingEntry
from vsched.policy.measured import NOTHING_MEASURED, Measured

# --- arrival ----------------------------------------------------------------------------------------------------------


class ArrivalView(msgspec.Struct, frozen=True, kw_only=True):
    """An arrived request.

    Attributes:
        tenant: Its tenant; empty for none.
        arrived_ns: Time of its arrival.
        target_ns: Deadline of its first token; None without a target.
        images: Number of its images.
        answers: Number of its choices.
        outputs_max: Maximum tokens of each choice; 0 for the rest of the context.
        asks: Number of times that it was held.
    """

    tenant: str = ""
    priority: int = 0
    arrived_ns: int
    target_ns: int | None = None
    images: int = 0
    answers: int = 1
    outputs_max: int = 0
    asks: int = 0


class FrontDoorView(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a front-door policy.

    Attributes:
        request: The arrived request, which the numbers below do not include.
        held: Number of held requests.
        preparing: Number of admitted requests whose prompt and images are being prepared.
        waiting: Number of requests that wait for their first step.
        as_urgent: Number of held, prepared and waiting requests with the priority of the request or a higher one.
        running: Number of requests with a slot.
        waiting_max: Maximum number of waiting requests; more are refused after their preparation
            (`generate.max_waiting`).
        tenant_requests: Number of requests of the same tenant: held, in preparation, waiting or running.
        load_tokens: Prompt and output tokens of all waiting and running requests.
        load_limit_tokens: Tokens that can run at a time.
        measured: Times of all replicas.
        state: The state of the policy, to be changed in place.
    """

    now_ns: int
    request: ArrivalView
    held: int = 0
    preparing: int = 0
    waiting: int = 0
    as_urgent: int = 0
    running: int = 0
    waiting_max: int = 0
    tenant_requests: int = 0
    load_tokens: int = 0
    load_limit_tokens: int = 0
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class Admit(msgspec.Struct, frozen=True):
    """Prepare the request, and hand it to the scheduler."""


class Hold(msgspec.Struct, frozen=True):
    """Hold the request and call the policy again at this time, up to `policies.passed_over_max_s` after its arrival."""

    until_ns: int


class Shed(msgspec.Struct, frozen=True):
    """Refuse the request.

    Attributes:
        reason: A clause for the client, without a full stop, with the value and the limit if there are any.
        retry_after_s: Seconds after which the client may retry.
        status: 429 if this client exceeds a limit, 503 if the server is overloaded.
    """

    reason: str
    retry_after_s: int = 1
    status: int = 429


class Redirect(msgspec.Struct, frozen=True):
    """Redirect the client to the same path of another server; `base_url` has no path."""

    base_url: str


FrontDoorAnswer = Admit | Hold | Shed | Redirect


# --- admission --------------------------------------------------------------------------------------------------------


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
        overdue: Index of the entry that goes before all behind it in any case, None for none: it was passed over for
            longer than `policies.passed_over_max_s`.
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
    overdue: int | None = None
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class Admission(msgspec.Struct, frozen=True):
    """Indices into `view.waiting` that join now, in this order; or hold everything until a time.

    Nothing can be held for longer than `policies.passed_over_max_s` after its arrival.
    """

    indices: Sequence[int] = ()
    hold_until_ns: int | None = None


# --- step -------------------------------------------------------------------------------------------------------------


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
        overdue: Indices of requests that advance in any case, and first if they are left out: they have not advanced
            for longer than `policies.passed_over_max_s`.
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
    overdue: Sequence[int] = ()
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


# --- preemption -------------------------------------------------------------------------------------------------------


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

    `in_need` is the index of the request that needs a block: no older one is preempted for it, see `eligible`.
    `swap_blocks_free` is how many blocks could be swapped out now, 0 where nothing is set aside for it. A block has
    `block_tokens` tokens. `measured` is of this replica, and `state` what the policy remembers, to be changed in place.
    """

    now_ns: int
    running: Sequence[RunningView]
    in_need: int = 0
    swap_blocks_free: int = 0
    block_tokens: int = 16
    measured: Measured = NOTHING_MEASURED
    state: Any = None

    @property
    def eligible(self) -> range:
        """Indices of the requests that can be preempted: the one in need, and younger ones."""
        return range(self.in_need, len(self.running))


Manner = Literal["recompute", "swap"]


class Preemption(msgspec.Struct, frozen=True):
    """Which request gives way, as an index into `view.running`, and how it comes back.

    `recompute`: its KV is computed again, but for what the prefix cache still has. `swap`: its blocks are copied to
    host memory now, and back when it goes on; where there is no room for them, it is recomputed.
    """

    victim: int
    manner: Manner = "recompute"


# --- the policy --------------------------------------------------------------------------------------------------


class EncodeLimits(msgspec.Struct, frozen=True):
    """Largest batch of images that an admission policy of the encode stage allows.

    Attributes:
        images: Maximum number of images in a batch; None for the default of the device.
        tokens: Maximum encoder output tokens of one image; 0 for no limit, None for `generate.max_batch_tokens`.
    """

    images: int | None = None
    tokens: int | None = 0


class RequestPolicy(Policy, frozen=True, kw_only=True):
    """Decides about requests: whether they enter, when they start, how they share a step, and which gives way.

    A subclass overrides the methods of the decisions that it makes. The kernel's defaults
    decide the others.
    """

    def arrive(self, view: FrontDoorView) -> FrontDoorAnswer:
        """Return `Admit`, `Hold`, `Shed` or `Redirect` for a request of which nothing has been prepared.

        Called again at the end of each hold.
        """
        return Admit()

    def admit(self, view: AdmissionView) -> Admission:
        """Return the waiting entries that join the next step, as indices into `view.waiting`.

        The kernel takes them in the given order and stops before the first that does not fit; refused entries keep
        their places.
        """
        return Admission(range(min(len(view.waiting), max(view.entries_free, 1))))

    def encode_limits(self) -> EncodeLimits:
        """Return the largest batch that `admit` allows in the encode stage: memory is reserved for that batch."""
        return EncodeLimits()

    def share(self, view: StepView) -> StepShares:
        """Return the prefilling requests that advance in a step, their order and their tokens.

        Called for every step in which a request can be prefilled, or can join while others decode. Each request gets
        a chunk: the minimum of its tokens, of the room and time left, and of the embeddings that are ready. If no
        request at all would advance, all advance in order.
        """
        return StepShares(range(len(view.prefilling)))

    def victim(self, view: PreemptionView) -> int | Preemption:
        """Return the running request that gives its KV blocks up, as an index into `view.running`.

        A `Preemption` also says how the request comes back; an index alone means `recompute`.
        """
        return len(view.running) - 1
