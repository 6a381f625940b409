"""Several choices of one request share its prompt: blocks, embeddings, admission, and ends that concern all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.kernel.setups import (
    assert_served,
    complete,
    crash,
    encode_statistics,
    image_request,
    joined,
    lose_while_running,
    make_cluster,
    prefilled,
    words,
)
from vsched.kernel.commands import Accept, RefusalCode
from vsched.kernel.events import Drain
from vsched.testing import make_request

NAMES = ("a", "a#1", "a#2", "a#3")


@pytest.mark.parametrize(
    ("changes", "prompt", "computed"),
    [
        ({}, 42, 42 + 3 * 2),
        ({"prefix_cache": False}, 42, 42 + 3 * 2),
        ({"chunk_tokens": 7}, 42, 42 + 3 * 2),
        ({"chunk_tokens": 7, "generators": 3, "prefix_cache": False}, 42, 42 + 3 * 2),
        ({"state_snapshots": 4}, 42, 42 + 3 * 2),
        # The last token of whole blocks is needed for its logits.
        ({}, 40, 40 + 3 * 4),
        # No blocks can be shared.
        ({"prefix_cache": False, "prompt_atomic": True}, 42, 4 * 42),
        ({"prefix_cache": False, "state_snapshots": 0}, 42, 4 * 42),
    ],
)
def test_choices_compute_a_prompt_once(changes: dict[str, Any], prompt: int, computed: int) -> None:
    """Each choice after the first computes its part of the last block, of four tokens."""
    cluster = make_cluster(**changes)
    cluster.submit(make_request("a", words(prompt)), choices=4)
    assert_served(cluster, *NAMES)
    assert prefilled(cluster) == computed


def test_answers_share_an_image_at_the_end_of_the_prompt() -> None:
    """Also if the last block, which each choice computes, contains part of it."""
    cluster = make_cluster(chunk_tokens=6)
    cluster.submit(image_request("a", (b"one", 9), (b"two", 12)), choices=4)
    assert_served(cluster, *NAMES)
    assert encode_statistics(cluster)["items_encoded"] == 2
    assert [key for batch in cluster.encoded for key in batch] == [b"one", b"two"]
    assert prefilled(cluster) == 22 + 3 * 2


def test_choices_without_a_prefix_cache_share_with_no_other_request() -> None:
    cluster = make_cluster(prefix_cache=False)
    cluster.submit(make_request("a", words(42)), choices=2)
    cluster.submit(make_request("b", words(42)), choices=2)
    complete(cluster, make_request("c", words(42)))
    assert prefilled(cluster) == 3 * 42 + 2 * 2


def test_answers_are_accepted_together_or_not_at_all() -> None:
    cluster = make_cluster(make_request("first", words(4), max_tokens=20), slots=1, waiting=4)
    cluster.submit(make_request("second", words(4)))
    commands = cluster.submit(make_request("a", words(42)), choices=4)
    assert not any(isinstance(one, Accept) for one in commands)
    refused = cluster.refused["a"]
    assert refused.code is RefusalCode.QUEUE_FULL
    assert (refused.value, refused.limit) == (5, 4)
    cluster.submit(make_request("b", words(42)), choices=3)
    assert_served(cluster, "b", "b#1", "b#2")


def test_an_answer_whose_id_is_in_use_refuses_all() -> None:
    cluster = make_cluster()
    cluster.submit(make_request("a#2", words(4)))
    cluster.submit(make_request("a", words(42)), choices=2)
    assert "a" not in cluster.refused
    cluster.submit(make_request("b#1", words(4)))
    cluster.requests.pop("b#1")
    before = dict(cluster.requests)
    cluster.submit(make_request("b", words(42)), choices=2)
    assert cluster.refused["b"].code is RefusalCode.DUPLICATE_ID
    assert cluster.requests.keys() - before.keys() == {"b"}


def test_answers_that_a_group_cannot_take_go_where_the_first_is() -> None:
    cluster = make_cluster(chunk_tokens=7, generators=2)
    cluster.send(Drain("generate-0"))
    cluster.submit(make_request("a", words(42)), choices=4)
    assert_served(cluster, *NAMES)
    assert prefilled(cluster) == 42 + 3 * 2


def test_poison_takes_the_other_answers_with_it() -> None:
    """One after the other, they would crash the group again."""
    cluster = make_cluster(slots=8)
    cluster.submit(make_request("a", words(6), max_tokens=50), choices=4)
    lose_while_running(cluster, "a")
    assert {cluster.ended[name].code for name in NAMES} == {"group_lost"}
    cluster.drain()
    cluster.check_settled()


def test_an_answer_waits_for_no_slot_while_the_prompt_is_computed() -> None:
    """Others may have them meanwhile."""
    cluster = make_cluster(chunk_tokens=7, slots=2)
    cluster.submit(make_request("a", words(42)), choices=4)
    complete(cluster, make_request("b", words(6, start=70)))
    assert joined(cluster)[:2] == ["a", "b"]
    assert_served(cluster, *NAMES, "b")
    assert prefilled(cluster) == 42 + 3 * 2 + 6


def test_the_first_answer_reports_a_cached_prompt_and_further_ones_share_it() -> None:
    """The first choice computes it from its first token on, once."""
    cluster = make_cluster(make_request("before", words(42)))
    cluster.drain()
    request = make_request("a", words(42))
    reported = msgspec.structs.replace(request.sampling, prompt_logprobs=1)
    cluster.submit(msgspec.structs.replace(request, sampling=reported), choices=3)
    assert_served(cluster, *NAMES[:3])
    assert prefilled(cluster) == 42 + 42 + 2 * 2
    assert cluster.ended["a"].times.cached_tokens == 0


def test_a_reported_prompt_is_cached_when_its_request_is_repeated() -> None:
    cluster = make_cluster()
    request = make_request("a", words(42), max_tokens=20)
    reported = msgspec.structs.replace(request.sampling, prompt_logprobs=1)
    cluster.submit(msgspec.structs.replace(request, sampling=reported))
    for _ in range(4):
        cluster.run_generate()
    cluster.submit(make_request("keeper", words(42)))
    crash(cluster)
    assert_served(cluster, "a", "keeper")
    joins = [(one.number, one.computed) for step in cluster.decisions for one in step.joined]
    assert joins[-1][1] > 0, "both computed the prompt"
