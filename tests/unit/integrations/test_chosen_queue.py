"""The queue that shows vLLM's scheduler only the chosen requests, with stand-ins for requests of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vsched.integrations.vllm.queue import ChosenQueue, Entry


def request(number: int, **more: Any) -> Any:
    one = SimpleNamespace(
        request_id=f"r{number}",
        sampling_params=SimpleNamespace(extra_args={"tenant": "a", "ttft_target_ms": 5}),
        arrival_time=0.0,
        priority=3,
        session_id=None,
        mm_features=[],
        max_tokens=10,
        num_prompt_tokens=20 + number,
        num_output_tokens=0,
        num_computed_tokens=0,
        num_preemptions=0,
        ready=True,
    )
    vars(one).update(more)
    one.vsched = Entry(one, number)
    return one


def filled(*requests: Any) -> ChosenQueue:
    queue = ChosenQueue(lambda one: one.ready, lambda entry: entry.renew_view(4, 16))
    for one in requests:
        queue.add_request(one)
    return queue


def test_entry_has_the_facts_of_policies() -> None:
    entry = request(1).vsched
    entry.renew_view(4, 16)
    assert entry.view.tokens == 17
    assert entry.view.blocks == 2
    assert (entry.view.tenant, entry.view.priority) == ("a", -3)
    assert entry.target_ns == entry.arrived_ns + 5_000_000
    long = SimpleNamespace(extra_args={"tenant": "x" * 20_000})
    cut = request(2, sampling_params=long, session_id="s" * 20_000).vsched
    assert (cut.tenant, cut.session) == ("x" * 64, "s" * 64)


def test_scheduler_sees_only_chosen_requests_and_others_keep_their_places() -> None:
    requests = [request(number) for number in range(4)]
    queue = filled(*requests)
    queue.show([requests[2].vsched, requests[0].vsched], 100)
    assert bool(queue)
    assert len(queue) == 4
    assert queue.pop_request() is requests[2]
    assert queue.peek_request() is requests[0]
    queue.prepend_request(requests[2])  # it did not fit in the end
    assert queue.hide()
    assert list(queue) == requests


def test_nothing_chosen_means_an_empty_queue_for_the_scheduler_only() -> None:
    queue = filled(request(0))
    queue.show((), 0)
    assert not queue
    assert not queue.hide()
    assert bool(queue)


def test_without_a_choice_it_is_first_come_first_served() -> None:
    requests = [request(number) for number in range(3)]
    queue = filled(*requests)
    assert [queue.pop_request() for _ in range(3)] == requests
    assert not queue


def test_requests_that_are_not_ready_wait_aside_and_are_promoted() -> None:
    grammar, plain = request(0, ready=False), request(1)
    queue = filled(grammar, plain)
    assert len(queue) == 2
    assert [entry.request for entry in queue.ordered] == [plain]
    queue.changed, grammar.ready = False, True
    queue.promote(lambda one: one.ready)
    assert list(queue) == [grammar, plain]
    assert queue.changed
    waiting = request(2, ready=False)
    queue.add_request(waiting)
    queue.remove_requests([waiting, plain, request(3)])
    assert list(queue) == [grammar]
