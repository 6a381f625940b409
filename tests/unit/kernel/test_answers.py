"""Several choices of one request share its prompt: blocks, embeddings, admission, and ends that concern all."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.unit.kernel.setups import (
    assert_served,
    encode_statistics,
    generate_statistics,
    image_request,
    joined,
    make_limits,
    words,
)
from vsched.kernel.commands import Accept, Command, RefusalCode
from vsched.kernel.events import Drain
from vsched.kernel.request import Phase
from vsched.testing import ModelCluster, make_request, run_random
from vsched.testing.cluster import random_limits
from vsched.types import Request

BLOCK = 4
NAMES = ("a", "a#1", "a#2", "a#3")


def prefilled(cluster: ModelCluster) -> int:
    return generate_statistics(cluster)["tokens_prefilled"]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk_tokens", [7, 1000])
@pytest.mark.parametrize("generators", [1, 3])
def test_answers_compute_the_prompt_once(
    prefix_cache: bool, chunk_tokens: int, generators: int
) -> None:
    """Each choice after the first computes its part of the last block: 2 of 42 tokens."""
    limits = make_limits(
        prefix_cache=prefix_cache, chunk_tokens=chunk_tokens, generators=generators
    )
    cluster = ModelCluster(limits)
    cluster.submit(make_request("a", words(42)), choices=4)
    assert (cluster.kernel.phase("a#2") is Phase.PROMPT) == (chunk_tokens == 7)
    assert_served(cluster, *NAMES)
    assert prefilled(cluster) == 42 + 3 * 2
    assert len({cluster.names[number] for number in cluster.names}) == 4


def test_answers_to_a_prompt_of_whole_blocks_compute_its_last_one() -> None:
    """The last token is needed for its logits."""
    cluster = ModelCluster(make_limits())
    cluster.submit(make_request("a", words(40)), choices=4)
    cluster.drain()
    assert prefilled(cluster) == 40 + 3 * BLOCK


def test_answers_share_an_image_at_the_end_of_the_prompt() -> None:
    """Also if the last block, which each choice computes, contains part of it."""
    cluster = ModelCluster(make_limits(chunk_tokens=6))
    cluster.submit(image_request("a", (b"one", 9), (b"two", 12)), choices=4)
    assert_served(cluster, *NAMES)
    assert encode_statistics(cluster)["items_encoded"] == 2
    assert [key for batch in cluster.encoded for key in batch] == [b"one", b"two"]
    assert prefilled(cluster) == 22 + 3 * 2


def test_choices_without_a_prefix_cache_share_with_no_other_request() -> None:
    cluster = ModelCluster(make_limits(prefix_cache=False))
    cluster.submit(make_request("a", words(42)), choices=2)
    cluster.submit(make_request("b", words(42)), choices=2)
    cluster.submit(make_request("c", words(42)))
    cluster.drain()
    assert prefilled(cluster) == 3 * 42 + 2 * 2


@pytest.mark.parametrize("changes", [{"prompt_atomic": True}, {"state_snapshots": 0}])
def test_choices_without_shareable_blocks_compute_their_own(changes: dict[str, int]) -> None:
    cluster = ModelCluster(make_limits(prefix_cache=False, **changes))
    cluster.submit(make_request("a", words(42)), choices=4)
    assert_served(cluster, *NAMES)
    assert prefilled(cluster) == 4 * 42


def test_answers_of_a_model_with_a_state_go_on_from_its_snapshot() -> None:
    cluster = ModelCluster(make_limits(state_snapshots=4))
    cluster.submit(make_request("a", words(42)), choices=4)
    assert_served(cluster, *NAMES)
    assert prefilled(cluster) == 42 + 3 * 2


def test_answers_are_accepted_together_or_not_at_all() -> None:
    cluster = ModelCluster(make_limits(slots=1, waiting=4))
    cluster.submit(make_request("first", words(4), max_tokens=20))
    cluster.submit(make_request("second", words(4)))
    commands = cluster.submit(make_request("a", words(42)), choices=4)
    assert not any(isinstance(one, Accept) for one in commands)
    refused = cluster.refused["a"]
    assert refused.code is RefusalCode.QUEUE_FULL
    assert (refused.value, refused.limit) == (5, 4)
    cluster.submit(make_request("b", words(42)), choices=3)
    cluster.drain()
    cluster.check_settled()
    assert_served(cluster, "b", "b#1", "b#2")


def test_an_answer_whose_id_is_in_use_refuses_all() -> None:
    cluster = ModelCluster(make_limits())
    cluster.submit(make_request("a#2", words(4)))
    cluster.submit(make_request("a", words(42)), choices=2)
    assert "a" not in cluster.refused
    cluster.submit(make_request("b#1", words(4)))
    cluster.requests.pop("b#1")
    before = dict(cluster.requests)
    cluster.submit(make_request("b", words(42)), choices=2)
    assert cluster.refused["b"].code is RefusalCode.DUPLICATE_ID
    assert cluster.requests.keys() - before.keys() == {"b"}


def test_answers_go_on_when_the_first_ends_in_its_prompt() -> None:
    cluster = ModelCluster(make_limits(chunk_tokens=7))
    cluster.submit(make_request("a", words(42)), choices=4)
    cluster.run_generate()
    cluster.abort("a")
    assert cluster.kernel.phase("a#1") is not Phase.PROMPT
    cluster.drain()
    cluster.check_settled()
    assert_served(cluster, *NAMES[1:])


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_answers_survive_the_loss_of_their_group(steps: int) -> None:
    cluster = ModelCluster(make_limits(chunk_tokens=7, generators=2))
    cluster.submit(make_request("a", words(42), max_tokens=9), choices=4)
    for _ in range(steps):
        cluster.run_generate()
    cluster.lose("generate-0")
    cluster.restore_group("generate-0")
    cluster.drain()
    cluster.check_settled()
    assert_served(cluster, *NAMES)


def test_answers_that_a_group_cannot_take_go_where_the_first_is() -> None:
    cluster = ModelCluster(make_limits(chunk_tokens=7, generators=2))
    cluster.send(Drain("generate-0"))
    cluster.submit(make_request("a", words(42)), choices=4)
    assert_served(cluster, *NAMES)
    assert prefilled(cluster) == 42 + 3 * 2


def test_poison_takes_the_other_answers_with_it() -> None:
    """One after the other, they would crash the group again."""
    cluster = ModelCluster(make_limits(slots=8))
    cluster.submit(make_request("a", words(6), max_tokens=50), choices=4)
    losses = 0
    while "a" not in cluster.ended:
        while cluster.generate_log and losses < 20:
            cluster.run_generate()
            if set(joined(cluster)) & set(NAMES):
                break
        cluster.lose("generate")
        losses += 1
        cluster.restore_group("generate")
        assert losses < 6
    assert {cluster.ended[name].code for name in NAMES} == {"group_lost"}
    cluster.drain()
    cluster.check_settled()


def test_an_answer_waits_for_no_slot_while_the_prompt_is_computed() -> None:
    """Others may have them meanwhile."""
    cluster = ModelCluster(make_limits(chunk_tokens=7, slots=2))
    cluster.submit(make_request("a", words(42)), choices=4)
    cluster.submit(make_request("b", words(6, start=70)))
    cluster.drain()
    assert joined(cluster)[:2] == ["a", "b"]
    assert_served(cluster, *NAMES, "b")
    assert prefilled(cluster) == 42 + 3 * 2 + 6


def test_the_first_answer_reports_a_cached_prompt_and_further_ones_share_it() -> None:
    """The first choice computes it from its first token on, once."""
    cluster = ModelCluster(make_limits())
    cluster.submit(make_request("before", words(42)))
    cluster.drain()
    request = make_request("a", words(42))
    reported = msgspec.structs.replace(request.sampling, prompt_logprobs=1)
    cluster.submit(msgspec.structs.replace(request, sampling=reported), choices=3)
    assert_served(cluster, *NAMES[:3])
    assert prefilled(cluster) == 42 + 42 + 2 * 2
    assert cluster.ended["a"].times.cached_tokens == 0


def test_a_prompt_that_was_told_of_is_cached_when_its_request_comes_again() -> None:
    cluster = ModelCluster(make_limits())
    request = make_request("a", words(42), max_tokens=20)
    reported = msgspec.structs.replace(request.sampling, prompt_logprobs=1)
    cluster.submit(msgspec.structs.replace(request, sampling=reported))
    for _ in range(4):
        cluster.run_generate()
    cluster.submit(make_request("keeper", words(42)))
    cluster.lose("generate")
    cluster.restore_group("generate")
    assert_served(cluster, "a", "keeper")
    joins = [(one.number, one.computed) for step in cluster.decisions for one in step.joined]
    assert joins[-1][1] > 0, "both computed the prompt"


@pytest.mark.parametrize("seed", range(12))
def test_runs_of_answers_alone_lose_nothing(seed: int) -> None:
    """Preemptions, losses, cancellations and moves, if every request has several choices."""

    class Several(ModelCluster):
        def submit(self, request: Request, *, choices: int = 1) -> list[Command]:
            return super().submit(request, choices=2 + choices)

    rng = random.Random(9000 + seed)
    limits = msgspec.structs.replace(random_limits(rng), prefix_cache=bool(seed % 2))
    if not limits.shares_blocks:
        limits = msgspec.structs.replace(limits, prefix_cache=False)
    run_random(rng, limits=limits, make=Several)
