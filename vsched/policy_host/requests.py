"""A request of a host: the facts that policies see, its views and times; and measurements that a host keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from vsched.policy import PrefillView, RunningView, WaitingEntry
from vsched.policy.measured import (
    WINDOW,
    EncodeTime,
    EndTime,
    FirstTokenTime,
    StepTime,
    SwapTime,
)


class HostedRequest(ABC):
    """A request, in the units of policies; a host implements the properties over its own requests.

    Attributes:
        order: Its place in the order of arrival, which it keeps for life.
        joined_ns: Time at which it first got a slot; 0 before.
        advanced_ns: Time of its latest prefill chunk.
        first_ns: Time of its first token; 0 before.
        cached: Prompt tokens found in the prefix cache when it first joined.
        view: Its view while it waits.
    """

    view: WaitingEntry

    def __init__(
        self,
        order: tuple[int, int],
        *,
        arrived_ns: int,
        priority: int = 0,
        tenant: str = "",
        session: str = "",
        target_ns: int | None = None,
        images: int = 0,
        image_tokens: int = 0,
        max_tokens: int = 0,
    ) -> None:
        self.order, self.arrived_ns, self.target_ns = order, arrived_ns, target_ns
        self.priority, self.tenant, self.session = priority, tenant, session
        self.images, self.image_tokens, self.max_tokens = images, image_tokens, max_tokens
        self.joined_ns = self.advanced_ns = self.first_ns = self.cached = 0

    @property
    @abstractmethod
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""

    @property
    @abstractmethod
    def output_tokens(self) -> int:
        """Number of output tokens so far."""

    @property
    @abstractmethod
    def computed_tokens(self) -> int:
        """Number of its first tokens that are computed."""

    @property
    @abstractmethod
    def preemptions(self) -> int:
        """Number of times that it was preempted."""

    @property
    def tokens(self) -> int:
        """Number of known tokens, prompt and output."""
        return self.prompt_tokens + self.output_tokens

    @property
    def left_tokens(self) -> int:
        """Known tokens that are not computed."""
        return self.tokens - self.computed_tokens

    def renew_view(self, cached: int, block_size: int) -> None:
        """Set the view of the waiting request, of which the prefix cache has `cached` tokens."""
        self.view = WaitingEntry(
            tokens=max(self.tokens - cached, 1),
            blocks=-(-self.tokens // block_size),
            priority=self.priority,
            arrived_ns=self.arrived_ns,
            target_ns=self.target_ns,
            tenant=self.tenant,
            session=self.session,
            images=self.images,
            image_tokens=self.image_tokens,
            max_tokens=self.max_tokens,
            outputs=self.output_tokens,
        )

    def prefill_view(self) -> PrefillView:
        """Return its view for step policies."""
        return PrefillView(
            tokens=self.left_tokens,
            computed=self.computed_tokens,
            priority=self.priority,
            arrived_ns=self.arrived_ns,
            joined_ns=self.joined_ns,
            target_ns=self.target_ns,
            tenant=self.tenant,
            session=self.session,
            max_tokens=self.max_tokens,
        )

    def running_view(self, blocks: int) -> RunningView:
        """Return its view for preemption policies."""
        return RunningView(
            tokens=self.computed_tokens,
            blocks=blocks,
            outputs=self.output_tokens,
            priority=self.priority,
            arrived_ns=self.arrived_ns,
            tenant=self.tenant,
            session=self.session,
            target_ns=None if self.first_ns else self.target_ns,
            images=self.images,
            max_tokens=self.max_tokens,
        )

    def join(self, now_ns: int, computed: int) -> int:
        """Note its first slot, with `computed` cached tokens; return the number of newly cached tokens."""
        if self.joined_ns:
            return 0
        self.joined_ns, self.cached = now_ns, computed
        return computed

    def first_token(self, now_ns: int) -> FirstTokenTime:
        """Note its first token, and return the times for policies."""
        self.first_ns = now_ns
        return FirstTokenTime(
            ended_ns=now_ns,
            ttft_ns=now_ns - self.arrived_ns,
            items_ns=0,
            queued_ns=self.joined_ns - self.arrived_ns,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached,
            items=self.images,
            priority=self.priority,
            tenant=self.tenant,
            target_ns=self.target_ns,
        )

    def end_time(self, now_ns: int) -> EndTime:
        """Return the times of its end for policies."""
        return EndTime(
            ended_ns=now_ns,
            total_ns=now_ns - self.arrived_ns,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            preemptions=self.preemptions,
            tenant=self.tenant,
        )


class HostMeasured:
    """`vsched.policy.measured.Measured` of a host without swaps and without an encode stage."""

    swaps: Sequence[SwapTime] = ()
    encodes: Sequence[EncodeTime] = ()
    embedding_hits = 0
    embedding_misses = 0

    def __init__(
        self,
        *,
        blocks_total: int = 0,
        blocks_free: Callable[[], int] = lambda: 0,
        tokens_running: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Keep the latest times; the host computes the blocks and tokens when they are read."""
        self._steps: deque[StepTime] = deque(maxlen=WINDOW)
        self._first_tokens: deque[FirstTokenTime] = deque(maxlen=WINDOW)
        self._ends: deque[EndTime] = deque(maxlen=WINDOW)
        self.blocks_total = blocks_total
        self.blocks_cached = 0
        self.tokens_prefilled = self.tokens_cached = 0
        self._blocks_free, self._tokens_running = blocks_free, tokens_running

    @property
    def steps(self) -> Sequence[StepTime]:
        return tuple(self._steps)

    @property
    def first_tokens(self) -> Sequence[FirstTokenTime]:
        return tuple(self._first_tokens)

    @property
    def ends(self) -> Sequence[EndTime]:
        return tuple(self._ends)

    @property
    def blocks_held(self) -> int:
        return self.blocks_total - self._blocks_free()

    @property
    def tokens_running(self) -> Mapping[str, int]:
        return MappingProxyType(self._tokens_running())

    def note_step(self, step: StepTime) -> None:
        """Note a step."""
        self._steps.append(step)
        self.tokens_prefilled += step.prefill_tokens

    def note_first_token(self, one: FirstTokenTime) -> None:
        """Note the first token of a request."""
        self._first_tokens.append(one)

    def note_end(self, one: EndTime) -> None:
        """Note the end of a request by a stop condition or its length."""
        self._ends.append(one)
