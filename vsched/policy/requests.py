"""Policies for requests: arrival, admission, the shares of a step, and preemption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from operator import index as to_int
from typing import Any, ClassVar, Literal, get_args

import msgspec

from vsched.policy.base import OfRequest, Policy, PolicyKey, View, WaitingEntry, decides
from vsched.policy.checks import (
    COUNT_MAX,
    TIME_MAX_NS,
    check_distinct,
    check_hold,
    check_index,
    check_number,
    check_text,
)

# --- arrival ----------------------------------------------------------------------------------------------------------


class ArrivingRequest(OfRequest, frozen=True, kw_only=True):
    """An arrived request.

    Attributes:
        arrived_ns: Time of its arrival.
        target_ns: Deadline of its first token; None without a target.
        images: Number of its images.
        choices: Number of its choices (`n`).
        outputs_max: Maximum output tokens of each choice; 0 for the rest of the context.
        asks: Number of times that it was held.
    """

    arrived_ns: int
    target_ns: int | None = None
    images: int = 0
    choices: int = 1
    outputs_max: int = 0
    asks: int = 0


class ArrivalView(View, frozen=True, kw_only=True):
    """Input of an arrival policy: an arrived request and the load of the server.

    Attributes:
        request: The arrived request, which the numbers below do not include.
        held: Number of held requests.
        preparing: Number of admitted requests whose prompt and images are being preprocessed.
        waiting: Number of requests that wait for their first step.
        as_urgent: Number of held, preparing and waiting requests with the priority of the request or a higher one.
        running: Number of requests with a slot.
        waiting_max: Maximum number of waiting requests; more are refused after preprocessing (`generate.max_waiting`).
        tenant_requests: Number of requests of the same tenant: held, preparing, waiting or running.
        load_tokens: Prompt and output tokens of all waiting and running requests.
        load_limit_tokens: Tokens that can run at the same time: the size of all KV caches.
        hold_max_ns: Maximum time from the arrival of the request to the end of a hold (`policies.passed_over_max_s`).
    """

    request: ArrivingRequest
    held: int = 0
    preparing: int = 0
    waiting: int = 0
    as_urgent: int = 0
    running: int = 0
    waiting_max: int = 0
    tenant_requests: int = 0
    load_tokens: int = 0
    load_limit_tokens: int = 0
    hold_max_ns: int = TIME_MAX_NS


class Admit(msgspec.Struct, frozen=True):
    """Admit the request: preprocess it, and pass it to the scheduler."""


class Hold(msgspec.Struct, frozen=True):
    """Hold the request and call the policy again at `until_ns`.

    A hold lasts 1 ms at least, and ends at most `view.hold_max_ns` after the arrival of the request.
    """

    until_ns: int


class Shed(msgspec.Struct, frozen=True):
    """Refuse the request.

    Attributes:
        reason: A clause for the client, without a full stop, with the value and the limit if there are any.
        retry_after_s: Seconds after which the client may retry, at least 1.
        status: 429 if this client exceeds a limit, 503 if the server is overloaded.
    """

    reason: str
    retry_after_s: int = 1
    status: int = 429


class Redirect(msgspec.Struct, frozen=True):
    """Redirect the client to the same path on another server; `base_url` has no path."""

    base_url: str


ArrivalDecision = Admit | Hold | Shed | Redirect
SHED_STATUS = (429, 503)
RETRY_AFTER_MAX_S = 24 * 3600


def check_arrival(
    returned: object, now_ns: int, arrived_ns: int, hold_max_ns: int
) -> ArrivalDecision:
    """Return the checked decision about an arrived request."""
    match returned:
        case Admit():
            return Admit()
        case Hold(until_ns):
            return Hold(check_hold(until_ns, now_ns, arrived_ns, hold_max_ns))
        case Shed(reason, retry_after_s, status):
            if status not in SHED_STATUS:
                raise ValueError(f"status {status} is none of {SHED_STATUS}")
            seconds = check_number(retry_after_s, least=1, most=RETRY_AFTER_MAX_S)
            return Shed(check_text(reason), seconds, to_int(status))
        case Redirect(base_url):
            url = check_text(base_url)
            if not url.startswith(("http://", "https://")) or not url.isprintable():
                raise ValueError(f"{url!r} is no base URL")
            return Redirect(url)
    raise TypeError(f"{returned!r} is no Admit, Hold, Shed or Redirect")


def default_arrival(*_: int) -> ArrivalDecision:
    """Admit the request."""
    return Admit()


# --- admission --------------------------------------------------------------------------------------------------------


class RunningView(OfRequest, frozen=True, kw_only=True):
    """One running request.

    Attributes:
        tokens: Tokens computed so far, prompt and output.
        blocks: KV blocks that it holds: from the start for its whole prompt.
        outputs: Output tokens so far.
        arrived_ns: Time of its arrival.
        target_ns: Deadline of its first token; None without a target, and after the first token.
        images: Number of its images.
        max_tokens: Maximum output tokens.
        blocks_shared: The part of `blocks` that other requests hold as well, so that they need not be computed or
            copied again to resume it. Only counted if there is swap space; else 0.
    """

    tokens: int
    blocks: int
    outputs: int
    arrived_ns: int
    target_ns: int | None = None
    images: int = 0
    max_tokens: int = 0
    blocks_shared: int = 0


PreemptionMode = Literal["recompute", "swap"]
MODES: tuple[PreemptionMode, ...] = get_args(PreemptionMode)


def check_mode(returned: str) -> PreemptionMode:
    """Return the checked mode."""
    if returned not in MODES:
        raise ValueError(f"mode {returned!r} is none of {', '.join(MODES)}")
    return MODES[MODES.index(returned)]


class AdmissionView(View, frozen=True, kw_only=True):
    """Input of an admission policy: the waiting entries and the free capacity of a stage.

    Attributes:
        stage: `encode` or `generate`.
        waiting: Waiting entries in queue order, the front first.
        tokens_free: Tokens that the step can still take.
        entries_free: Maximum number of entries that can join: free slots, or the maximum images of a batch in the
            encode stage.
        blocks_free: KV blocks that are free or evictable; 0 in the encode stage.
        running: Requests with a slot, or images that are being encoded.
        divisible: Whether an entry can join with a part of its tokens (chunked prefill).
        default_tokens: Default token budget of a step or batch.
        block_tokens: Tokens per KV block.
        running_requests: The running requests, oldest first; empty in the encode stage. Computed on access.
        eligible: Indices into `running_requests` of the requests that can be preempted now; see `Admission.preempt`.
            Empty for a policy class whose `preempts` is False.
        overdue: Index of the entry that goes first whatever the policy returns: it was passed over for longer than
            `policies.passed_over_max_s`. None for none.
        hold_max_ns: Maximum time from the arrival of each waiting entry to the end of a hold: the same setting.
    """

    stage: str
    waiting: Sequence[WaitingEntry]
    tokens_free: int
    entries_free: int
    blocks_free: int
    running: int
    divisible: bool
    default_tokens: int
    block_tokens: int = 16
    running_requests: Sequence[RunningView] = ()
    eligible: Sequence[int] = ()
    overdue: int | None = None
    hold_max_ns: int = TIME_MAX_NS


class Admission(msgspec.Struct, frozen=True):
    """The entries that join, or a time until which no entry joins.

    Attributes:
        indices: Indices into `view.waiting` of the entries that join now, in this order; empty for none.
        hold_until_ns: Time until which no entry joins and the policy is not called; None for no hold. At least 1 ms
            from now, and at most `view.hold_max_ns` after the arrival of each waiting entry.
        preempt: Indices into `view.running_requests` of the requests that give up their slots, in this order: one for
            each entry of `indices` that finds no free slot. All are in `view.eligible`: they decode and got a token
            since they joined, did not take their slot from another request, and were without a slot because of such
            preemptions for less than `policies.passed_over_max_s` in total. None is while a request is overdue.
        mode: How they are resumed, as in `Preemption`.
    """

    indices: Sequence[int] = ()
    hold_until_ns: int | None = None
    preempt: Sequence[int] = ()
    mode: PreemptionMode = "recompute"


def check_admission(
    returned: Admission,
    waiting: Sequence[Any],
    entries_free: int,
    running: int,
    now_ns: int,
    hold_max_ns: int,
    eligible: Sequence[int] = (),
) -> Admission:
    """Return the checked admission; while nothing runs, an entry must join, or all be held.

    `waiting` are entries with an `arrived_ns`, not the view's own: a policy can change these by force.
    """
    del entries_free
    indices = check_distinct(returned.indices, len(waiting))
    hold_until_ns = returned.hold_until_ns
    if len(returned.preempt):
        preempt = check_distinct(returned.preempt, max(eligible, default=-1) + 1)
        if not {*eligible}.issuperset(preempt):
            raise ValueError(f"{list(preempt)} cannot all be preempted, only {list(eligible)}")
        if hold_until_ns is not None or len(indices) < len(preempt):
            raise ValueError(f"{len(preempt)} requests are preempted for {len(indices)} that join")
        return Admission(indices, None, preempt, check_mode(returned.mode))
    if hold_until_ns is None:
        if not indices and not running and waiting:
            raise ValueError("nothing runs, nothing is admitted and no time to hold until is given")
        return Admission(indices)
    if indices:
        raise ValueError("entries join, and yet everything is held")
    arrived_ns = min(entry.arrived_ns for entry in waiting)
    return Admission(indices, check_hold(hold_until_ns, now_ns, arrived_ns, hold_max_ns))


def default_admission(waiting: Sequence[WaitingEntry], entries_free: int, *_: Any) -> Admission:
    """Admit all entries for which there is capacity, in queue order."""
    return Admission(range(min(len(waiting), max(entries_free, 1))))


# --- step -------------------------------------------------------------------------------------------------------------


class PrefillView(OfRequest, frozen=True, kw_only=True):
    """One request that is being prefilled.

    Attributes:
        tokens: Prompt tokens still to be computed.
        computed: Prompt tokens before them, which are computed or cached: attention reads their KV.
        arrived_ns: Time of its arrival.
        joined_ns: Time at which it first got a slot.
        target_ns: Deadline of its first token; None without a target.
        max_tokens: Maximum output tokens.
    """

    tokens: int
    computed: int
    arrived_ns: int
    joined_ns: int
    target_ns: int | None = None
    max_tokens: int = 0


def pairs_of(start: int, tokens: int) -> float:
    """Return the number of pairs of a token and one before it, for tokens from `start`."""
    return tokens * (start + tokens / 2)


def tokens_taking(time_ns: float, first_ns: float, pair_ns: float) -> float:
    """Return the number of tokens that take `time_ns`: the first takes `first_ns`, each one `pair_ns` more."""
    # The root of first_ns * n + pair_ns * n² / 2 = time_ns.
    divisor_ns = first_ns + math.sqrt(first_ns**2 + 2 * pair_ns * time_ns)
    return 2 * time_ns / divisor_ns if divisor_ns else 0.0


class StepView(View, frozen=True, kw_only=True):
    """Input of a step policy: the requests that a step can prefill, and its limits.

    Attributes:
        prefilling: Requests that can be prefilled now, oldest first. Requests that wait for an embedding are left out.
        waiting: Number of requests that wait for a slot and may get one; they get the rest of the step.
        decodes: Number of tokens that requests decode in the step, drafts included.
        tokens_free: Tokens that the step can still take.
        time_ns: Time limit of the prefill in this step; None for no limit. It is the rest of `generate.step_target_ms`
            next to decodes, or `generate.prefill_target_ms` without; or longer, by `generate.step_target_ratio`.
        decode_ns: Estimated time of the decodes alone; 0 before there is an estimate.
        token_ns: Estimated time per prompt token; 0 before there is an estimate.
        pair_ns: Estimated time per pair of a prompt token and an earlier token; 0 before there is an estimate.
        chunk_min: Minimum tokens of a chunk that is cut by time: those of a KV block, in vLLM 16.
        overdue: Indices into `prefilling` of requests that advance whatever the policy returns, and first if it leaves
            them out: they have not advanced for longer than `policies.passed_over_max_s`.
    """

    prefilling: Sequence[PrefillView]
    waiting: int
    decodes: int
    tokens_free: int
    time_ns: int | None = None
    decode_ns: float = 0.0
    token_ns: float = 0.0
    pair_ns: float = 0.0
    chunk_min: int = 16
    overdue: Sequence[int] = ()

    def prefill_ns(self, request: PrefillView, tokens: int) -> float:
        """Estimated time of the next `tokens` prompt tokens of a request; 0 before there is an estimate."""
        return tokens * self.token_ns + pairs_of(request.computed, tokens) * self.pair_ns

    def tokens_within(self, request: PrefillView, time_ns: float) -> int:
        """Number of the next prompt tokens of a request that fit into `time_ns`: all, or a multiple of `chunk_min`.

        All before there is an estimate.
        """
        if not (self.token_ns or self.pair_ns):
            return request.tokens
        first_ns = self.token_ns + self.pair_ns * request.computed
        tokens = tokens_taking(max(time_ns, 0.0), first_ns, self.pair_ns)
        return request.tokens if tokens >= request.tokens else int(tokens - tokens % self.chunk_min)


class StepShares(msgspec.Struct, frozen=True):
    """The requests that advance in a step, their order, and their tokens.

    Attributes:
        order: Indices into `view.prefilling` of the requests that advance.
        tokens: Maximum tokens of each of them, in the same order; None for all that fit.
        time_ns: Time limit of the prefill in this step, in place of `view.time_ns`; None to keep that. A block is
            prefilled in any case. Ignored in a step without decodes, or without a limit.
    """

    order: Sequence[int]
    tokens: Sequence[int] | None = None
    time_ns: int | None = None


def check_shares(returned: StepShares, count: int) -> StepShares:
    """Return the checked shares of `count` requests."""
    order = check_distinct(returned.order, count)
    tokens, time_ns = returned.tokens, returned.time_ns
    if tokens is not None:
        tokens = [check_number(one, most=COUNT_MAX) for one in islice(tokens, count + 1)]
        if len(tokens) != len(order):
            raise ValueError(f"{tokens} are not counts for each of {order}")
    if time_ns is not None:
        time_ns = check_number(time_ns, most=TIME_MAX_NS)
    return StepShares(order, tokens, time_ns)


def default_shares(count: int) -> StepShares:
    """Let all requests advance, oldest first."""
    return StepShares(range(count))


# --- preemption -------------------------------------------------------------------------------------------------------


class PreemptionView(View, frozen=True, kw_only=True):
    """Input of a preemption policy: the running requests when no KV block is free.

    Attributes:
        running: The running requests, oldest first.
        in_need: Index into `running` of the request that needs a block. No older request is preempted for it.
        swap_blocks_free: KV blocks that can be swapped out now; 0 without swap space.
        block_tokens: Tokens per KV block.
    """

    running: Sequence[RunningView]
    in_need: int = 0
    swap_blocks_free: int = 0
    block_tokens: int = 16

    @property
    def eligible(self) -> range:
        """Indices of the requests that can be preempted: the one in need, and younger ones."""
        return range(self.in_need, len(self.running))


class Preemption(msgspec.Struct, frozen=True):
    """The request to preempt, and how it is resumed.

    Attributes:
        victim: Index into `view.running`.
        mode: `recompute` to compute its KV again, except the blocks that the prefix cache still has; `swap` to copy
            its blocks to host memory now and back when it resumes. A request that does not fit into the swap space is
            recomputed.
    """

    victim: int
    mode: PreemptionMode = "recompute"


def check_preemption(returned: int | Preemption, count: int) -> Preemption:
    """Return the checked victim among `count` requests, with its mode."""
    found = returned if isinstance(returned, Preemption) else Preemption(to_int(returned))
    index = check_index(found.victim, count)
    return Preemption(index, check_mode(found.mode))


def default_preemption(count: int) -> Preemption:
    """Recompute the youngest request."""
    return Preemption(count - 1)


# --- the policy --------------------------------------------------------------------------------------------------


class EncodeLimits(msgspec.Struct, frozen=True):
    """Largest batch of images that an admission policy of the encode stage allows.

    Attributes:
        images: Maximum number of images in the batches of all encode replicas together; None for the default of the
            device.
        tokens: Maximum encoder output tokens of one image; 0 for no limit, None for `generate.max_batch_tokens`.
    """

    images: int | None = None
    tokens: int | None = 0


def check_encode_limits(returned: EncodeLimits) -> EncodeLimits:
    """Return the checked limits."""
    images, tokens = returned.images, returned.tokens
    if images is not None:
        images = check_number(images, least=1, most=COUNT_MAX)
    if tokens is not None:
        tokens = check_number(tokens, most=COUNT_MAX)
    return EncodeLimits(images, tokens)


class RequestPolicy(Policy, frozen=True, kw_only=True):
    """Decides about requests: arrival, admission, the shares of a step, and preemption.

    A subclass overrides the methods of the decisions that it makes. The kernel's defaults decide the others.
    """

    preempts: ClassVar[bool] = False
    """Whether `admit` may preempt running requests for waiting ones (`Admission.preempt`), in the generate stage. It is
    then called while no slot is free, too."""

    @decides(
        "arrival",
        PolicyKey("arrival", "open", "Admission of requests, before any work is done for them."),
        check=check_arrival,
        default=default_arrival,
    )
    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        """Return `Admit`, `Hold`, `Shed` or `Redirect` for a request before its preprocessing; by default `Admit`.

        Called when a request arrives, and again at the end of each hold.
        """
        return Admit()

    @decides(
        "admission",
        PolicyKey(
            "encode.admission",
            "token-budget",
            "Choice of the images that join an encode step. `max_tokens` also limits the "
            "tokens of one image; by default it is `generate.max_batch_tokens`, and 0 "
            "switches both limits off. `max_items` is 8 by default, but 1 on a CPU, where a "
            "batch takes as long as its images one by one.",
        ),
        PolicyKey(
            "generate.admission",
            "fifo",
            "Choice of the waiting requests that join the next step.",
        ),
        check=check_admission,
        default=default_admission,
    )
    def admit(self, view: AdmissionView) -> Admission:
        """Return indices into `view.waiting` of the entries that join the next step; by default all, in queue order.

        Called when entries wait and the stage has capacity; with `preempts`, also without a free slot. The kernel takes
        the entries in the given order and stops before the first that does not fit; the others keep their places.
        """
        return default_admission(view.waiting, view.entries_free)

    def encode_limits(self) -> EncodeLimits:
        """Return the largest batch that `admit` allows in the encode stage; memory is reserved for it.

        Called at startup for the policy of `encode.admission`.
        """
        return EncodeLimits()

    @decides(
        "step",
        PolicyKey(
            "generate.step",
            "shortest-remaining",
            "Choice of the prefilling requests that advance in a step, and by how many tokens.",
        ),
        check=check_shares,
        default=default_shares,
    )
    def share(self, view: StepView) -> StepShares:
        """Return the prefilling requests that advance in a step, their order and tokens; by default all, oldest first.

        Called for every step in which a request can be prefilled, or can join while others decode. Each request gets a
        chunk: the minimum of its tokens, of the remaining tokens and time of the step, and of the tokens before the
        first missing embedding. If no request at all would advance, all advance in order.
        """
        return default_shares(len(view.prefilling))

    @decides(
        "preemption",
        PolicyKey(
            "generate.preemption",
            "youngest",
            "Choice of the request to preempt when KV blocks run out, and of recomputation "
            "or swapping to host memory.",
        ),
        check=check_preemption,
        default=default_preemption,
    )
    def victim(self, view: PreemptionView) -> int | Preemption:
        """Return the running request to preempt, as an index into `view.running`; by default the youngest.

        Called while a request needs a KV block and none is free or evictable. A `Preemption` also says how the request
        is resumed; an index alone means `recompute`.
        """
        return len(view.running) - 1
