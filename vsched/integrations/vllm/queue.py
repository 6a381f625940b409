"""The waiting requests of vLLM, ordered and chosen by the admission policy; stands in for its request queue.

`Scheduler.schedule()` of vLLM takes requests from the front of `self.waiting` until it is empty or one does not fit. So
while `schedule()` runs, this queue shows it only the chosen requests, in the order of the policy. All others stay in
their places, and all count.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vsched.integrations.vllm.settings import NAME_CHARACTERS_MAX, target_of, tenant_of
from vsched.policy_host import HostedRequest, OrderedQueue

VllmRequest = Any
"""`vllm.v1.request.Request`."""


class Entry(HostedRequest):
    """A request of vLLM, `request`; `looked` is the step in which the prefix cache was last searched for it."""

    def __init__(self, request: VllmRequest, number: int) -> None:
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        waited_s = min(max(time.time() - request.arrival_time, 0.0), 3600.0)
        arrived_ns = time.monotonic_ns() - int(waited_s * 1e9)
        super().__init__(
            (number, 0),
            arrived_ns=arrived_ns,
            priority=-request.priority,  # vLLM: less is more urgent
            tenant=tenant_of(extra),
            session=str(request.session_id or "")[:NAME_CHARACTERS_MAX],
            target_ns=target_of(extra, arrived_ns),
            images=len(request.mm_features),
            image_tokens=sum(one.mm_position.length for one in request.mm_features),
            max_tokens=request.max_tokens,
        )
        self.request, self.looked = request, -1

    @property
    def prompt_tokens(self) -> int:
        return int(self.request.num_prompt_tokens)

    @property
    def output_tokens(self) -> int:
        return int(self.request.num_output_tokens)

    @property
    def computed_tokens(self) -> int:
        return int(self.request.num_computed_tokens)

    @property
    def preemptions(self) -> int:
        return int(self.request.num_preemptions)

    def images_at(self) -> list[tuple[str, int, int]]:
        """Return key, offset and length of its images."""
        features = self.request.mm_features
        return [(str(f.identifier), f.mm_position.offset, f.mm_position.length) for f in features]


class ChosenQueue:
    """Replaces a `RequestQueue` of vLLM, with its methods.

    Attributes:
        ordered: Requests that can join, in order of arrival.
        unready: Requests that cannot join yet: their grammar is being compiled, or output of theirs is in flight.
        changed: Whether something has changed since the front did not fit; if not, the policy is not asked.
        chosen: Requests that `schedule()` sees while it runs; None outside of it.
    """

    def __init__(
        self, is_ready: Callable[[VllmRequest], bool], view: Callable[[Entry], None]
    ) -> None:
        """Create an empty queue; `view` sets the view of an entry that begins to wait."""
        self.ordered: OrderedQueue[Entry] = OrderedQueue()
        self.unready: dict[str, VllmRequest] = {}
        self.changed = True
        self.chosen: deque[VllmRequest] | None = None
        self._is_ready, self._view = is_ready, view
        self._now_ns = 0

    def show(self, chosen: Iterable[Entry], now_ns: int) -> None:
        """Show these requests to `schedule()`, which runs now."""
        self.chosen = deque([entry.request for entry in chosen])
        self._now_ns = now_ns

    def hide(self) -> bool:
        """Show all requests again; return True if `schedule()` left chosen ones."""
        left, self.chosen = self.chosen, None
        return bool(left)

    def promote(self, check: Callable[[VllmRequest], bool]) -> None:
        """Move requests that have become ready to their places."""
        for name, request in [*self.unready.items()]:
            if check(request):
                del self.unready[name]
                self._put(request)

    def _put(self, request: VllmRequest) -> None:
        self._view(request.vsched)
        self.ordered.put_new(request.vsched)
        self.changed = True

    # --- methods of `RequestQueue` ---

    def add_request(self, request: VllmRequest) -> None:
        if self._is_ready(request):
            self._put(request)
        else:
            self.unready[request.request_id] = request

    prepend_request = add_request

    def prepend_requests(self, requests: Iterable[VllmRequest]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> VllmRequest:
        return self.chosen[0] if self.chosen is not None else next(iter(self))

    def pop_request(self) -> VllmRequest:
        """Remove and return the first request, which joins; those ahead of it are passed over."""
        request = self.peek_request()
        if self.chosen is not None:
            self.chosen.popleft()
            self.ordered.remove(request.vsched, chosen_ns=self._now_ns)
        else:
            self.remove_request(request)
        return request

    def remove_request(self, request: VllmRequest) -> None:
        self.changed = True
        if self.unready.pop(request.request_id, None) is None and request.vsched in self.ordered:
            self.ordered.remove(request.vsched)

    def remove_requests(self, requests: Iterable[VllmRequest]) -> None:
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self.chosen) if self.chosen is not None else len(self) > 0

    def __len__(self) -> int:
        return len(self.ordered) + len(self.unready)

    def __iter__(self) -> Iterator[VllmRequest]:
        for entry in self.ordered:
            yield entry.request
        yield from self.unready.values()
