"""The fast simulator: times are arithmetic, limits are kept, runs repeat, and faults are reported."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import msgspec
import numpy as np
import pytest

from tests.each_case import each_case
from tests.unit.kernel.policy_pool import Reversed
from tests.unit.sim.shapes import COST, SCARCE, TINY, arrival, config, scarce
from vsched.errors import ConfigError, PolicyError
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command, Finish
from vsched.kernel.events import Event, PolicyReplaced, Stepped
from vsched.policy import Policy
from vsched.sim.cost.model import CostModel, EncodeCost, GenerateCost, HostCost
from vsched.sim.fast.metrics import (
    SAMPLE_NS,
    SAMPLES_MAX,
    SUMS,
    Sampler,
    SimulationOutcome,
    Sketch,
    Targets,
)
from vsched.sim.fast.simulation import START_NS, simulate
from vsched.sim.invariants import Oracles
from vsched.sim.setup import prepare
from vsched.sim.workload.requests import Arrival, Image, Text, Video, Workload, workload_of
from vsched_policies.admission import Fifo, TokenBudget
from vsched_policies.requests import TenantFair

PLAIN = msgspec.structs.replace(
    COST,
    name="plain",
    encode=EncodeCost(step_ns=1e6, item_ns=1e6, token_ns=4e3),
    generate=GenerateCost(step_ns=2e6, decode_ns=1e6, context_ns=100, prefill_ns=1e4, pair_ns=10),
    host=HostCost(),
)


class Seen:
    def __init__(self) -> None:
        self.finishes: dict[str, tuple[Finish, int]] = {}
        self.steps: list[Stepped] = []
        self.stepped_ns: list[int] = []

    def see(
        self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
    ) -> None:
        if isinstance(event, Stepped):
            self.steps.append(event)
            self.stepped_ns.append(now_ns)
        for command in commands:
            if isinstance(command, Finish):
                self.finishes[command.request_id] = (command, now_ns - START_NS)

    def gaps_ns(self) -> list[int]:
        return [after - before for before, after in pairwise(self.stepped_ns)]

    def ttft_ns(self, name: str) -> int:
        return self.finishes[name][0].times.first_token_ns - START_NS

    def submitted_ns(self, name: str) -> int:
        return self.finishes[name][0].times.submitted_ns - START_NS

    def end_ns(self, name: str) -> int:
        return self.finishes[name][1]


def run(workload: Workload, *sets: str, cost: CostModel = PLAIN) -> tuple[SimulationOutcome, Seen]:
    seen = Seen()
    return simulate(config(*sets), workload, cost=cost, observers=[seen], oracles=True), seen


def test_run_times_of_a_text_are_those_of_its_steps() -> None:
    """100 tokens in one chunk, then three decodes that see 101, 102 and 103 tokens."""
    _, seen = run(workload_of("one", [arrival(1, 0, Text(1, 100), outputs=4)]))
    first_ns = 2_000_000 + 100 * 10_000 + 10 * 100 * 50
    assert seen.ttft_ns("r1") == first_ns
    decodes_ns = 3 * 3_000_000 + 100 * (101 + 102 + 103)
    assert seen.end_ns("r1") == first_ns + decodes_ns


def test_run_times_of_an_image_include_its_preparation_and_encoding() -> None:
    host = HostCost(request_ns=1_000_000, image_ns=4_000_000, pixel_ns=10)
    workload = workload_of("one", [arrival(1, 0, Image("a", 50), Text(1, 50), outputs=1)])
    outcome, seen = run(workload, cost=with_host(host))
    prepared_ns = 1_000_000 + 4_000_000 + 10 * 50 * 4 * 196
    encoded_ns = 2_000_000 + 1000 * 200
    step_ns = 2_000_000 + 100 * 10_000 + 10 * 100 * 50
    assert seen.ttft_ns("r1") == prepared_ns + encoded_ns + step_ns
    assert outcome.figures.ttft_ms.p50 == pytest.approx(seen.ttft_ns("r1") / 1e6, rel=0.01)
    assert outcome.figures.queue_ms.p50 == pytest.approx(encoded_ns / 1e6, rel=0.01)


def with_host(host: HostCost) -> CostModel:
    return msgspec.structs.replace(PLAIN, name="host", host=host)


def test_run_lets_a_step_on_ranks_that_were_idle_take_longer() -> None:
    """Only the first step: the others follow it directly, and are decided one ahead."""
    workload = workload_of("one", [arrival(1, 0, Text(1, 100), outputs=4)])
    _, warm = run(workload)
    _, cold = run(workload, cost=with_host(HostCost(cold=1.5)))
    assert cold.ttft_ns("r1") == 1.5 * warm.ttft_ns("r1")
    assert cold.end_ns("r1") - warm.end_ns("r1") == 0.5 * warm.ttft_ns("r1")
    _, later = run(workload, cost=with_host(HostCost(decision_ns=500_000)))
    assert later.end_ns("r1") - warm.end_ns("r1") == 500_000


def test_run_stages_that_share_a_process_take_turns() -> None:
    image = arrival(2, 1, Image("a", 500), Text(2, 5), outputs=1)
    two = workload_of("two", [arrival(1, 0, Text(1, 20), outputs=30), image])
    (_, apart), (_, together) = run(two), run(two, 'placement="together"')
    encode_ns = 2_000_000 + 2000 * 1000
    assert together.end_ns("r1") == pytest.approx(apart.end_ns("r1") + encode_ns, abs=1)


def test_run_encoding_pauses_for_the_steps_of_its_process() -> None:
    """No request waits much longer for a token than a time slice and a step; the work is the same."""
    image = arrival(2, 20, Image("a", 1500), Text(2, 5), outputs=1)
    two = workload_of("two", [arrival(1, 0, Text(1, 20), outputs=30), image])
    sets = ('placement="together"', "generate.step_target_ratio=1.5")
    _, whole = run(two, *sets, "generate.step_target_ms=0")
    _, cut = run(two, *sets, "generate.step_target_ms=4")
    encode_ns, decode_ns = 2_000_000 + 6000 * 1000, 3_100_000
    assert max(whole.gaps_ns()) > encode_ns
    assert max(cut.gaps_ns()) < 2.5 * decode_ns < encode_ns
    assert cut.ttft_ns("r2") > whole.ttft_ns("r2")
    _, elsewhere = run(two, *sets, "generate.step_target_ms=4", 'encode.device="cuda:0"')
    assert max(elsewhere.gaps_ns()) > encode_ns, "nothing pauses there"


def test_run_short_request_waits_for_short_steps_of_a_long_prompt() -> None:
    long = [arrival(n, 50 * n, Text(n, 400 * n), outputs=1) for n in (1, 2)]
    two = workload_of("two", [*long, arrival(3, 101, Text(3, 5), outputs=1)])
    waits = []
    for target_ms in (0, 1):
        _, seen = run(two, f"generate.prefill_target_ms={target_ms}")
        waits.append(seen.ttft_ns("r3") - seen.submitted_ns("r3"))
    assert waits[1] < 0.5 * waits[0]


@pytest.mark.parametrize("streams", [1, 3])
def test_run_short_request_overtakes_a_long_prompt_next_to_streams(streams: int) -> None:
    running = [arrival(n, 0, Text(n, 20), outputs=300) for n in range(streams)]
    long, short = arrival(20, 100, Text(20, 2000)), arrival(30, 110, Text(30, 20))
    waits, sets = {}, ("generate.step_target_ms=6", "generate.step_target_ratio=2")
    together = workload_of("all", [*running, long, short])
    for use in ("in-order", "shortest-remaining"):
        _, seen = run(together, *sets, f"generate.step.use={use}")
        waits[use] = [seen.ttft_ns(name) - seen.submitted_ns(name) for name in ("r30", "r20")]
    assert waits["shortest-remaining"][0] < 0.5 * waits["in-order"][0]
    assert waits["shortest-remaining"][1] < 1.2 * waits["in-order"][1]


def test_run_sends_a_turn_after_the_answer_to_the_one_before() -> None:
    """The client thinks after an answer, and sends the next turn no earlier than planned."""
    said = Text(1, 30)
    first = arrival(1, 0, said, outputs=20, conversation="c")
    second = arrival(2, 1, said, Text(2, 5), outputs=2, conversation="c", think_ns=7_000_000)
    third = arrival(3, 2, said, Text(3, 5), outputs=2, conversation="c")
    outcome, seen = run(workload_of("talk", [first, second, third]))
    ended_ns = seen.end_ns("r1")
    assert seen.submitted_ns("r2") == ended_ns + 7_000_000
    assert seen.submitted_ns("r3") == seen.end_ns("r2")
    assert outcome.figures.finished == 3
    assert outcome.figures.prefix_hits > 0
    for planned_ns, sent_ns in ((1_000_000, 7_000_000), (9_000_000, 9_000_000)):
        later = msgspec.structs.replace(second, at_ns=ended_ns + planned_ns)
        _, seen = run(workload_of("two", [first, later]))
        assert seen.submitted_ns("r2") == ended_ns + sent_ns


LARGE_AND_SMALL = [
    arrival(1, 0, Image("a", 500), Text(1, 5), conversation="c"),
    arrival(2, 1, Text(2, 5), conversation="c"),
]
SIX = [arrival(n, 0, Image(f"{n}", 500), Text(n, 5), outputs=9) for n in range(6)]
NARROW = "arena.pixel_bytes=100000"
"""Room for the pixels of one of the six images, of 500 x 4 x 12 x 4 bytes."""


def with_videos(count: int) -> list[Arrival]:
    return [arrival(1, 0, *(Video(f"{number}", 3, 4) for number in range(count)), Text(1, 5))]


@each_case(
    ("arrivals", "sets", "failed"),
    [
        (LARGE_AND_SMALL, ["generate.context_tokens=64"], {"context_exceeded": 1}),
        (LARGE_AND_SMALL, ['generate.memory={use="pinned", tokens=64}'], {"kv_exceeded": 1}),
        (LARGE_AND_SMALL, ["arena.embedding_bytes=4096"], {"image_exceeds_cache": 1}),
        (LARGE_AND_SMALL, ["arena.pixel_bytes=4096"], {"pixels_exceeded": 1}),
        (LARGE_AND_SMALL, ["media.images_max=0"], {"too_many_images": 1}),
        (LARGE_AND_SMALL, ["encode.replicas=0"], {"images_not_taken": 1}),
        (SIX, [NARROW, "media.prepare_s=0.05"], {"prepare_timeout": 4}),
        (SIX, [NARROW, "media.preparing_max=3"], {"queue_full": 2}),
        # Limits of images and of videos count videos, not frames.
        (with_videos(3), ["media.images_max=3"], {}),
        (with_videos(4), ["media.images_max=3"], {"too_many_images": 1}),
        (with_videos(5), ["media.images_max=3"], {"too_many_videos": 1}),
    ],
)
def test_run_refuses_the_requests_that_a_server_refuses(
    arrivals: list[Arrival], sets: list[str], failed: dict[str, int]
) -> None:
    figures = run(workload_of("some", arrivals), *sets)[0].figures
    assert figures.failed == failed
    assert figures.finished == len(arrivals) - sum(failed.values())
    assert figures.good_share == figures.finished / len(arrivals)


def test_run_waits_for_room_for_pixels() -> None:
    """Each image has its room until its request has ended."""
    _, roomy = run(workload_of("six", SIX))
    outcome, tight = run(workload_of("six", SIX), NARROW)
    assert outcome.figures.finished == 6
    starts = sorted(one.times.submitted_ns for one, _ in tight.finishes.values())
    ends = sorted(end_ns + START_NS for _, end_ns in tight.finishes.values())
    assert starts[1:] == ends[:-1]
    assert max(map(roomy.end_ns, roomy.finishes)) < max(map(tight.end_ns, tight.finishes))


def test_run_images_and_frame_groups_that_are_there_need_no_preparation() -> None:
    """A video again, and extended by two groups, in the next turns of a conversation."""
    cost = with_host(HostCost(image_ns=5_000_000))
    arrivals = [arrival(n, 50 * n, Image("same", 50), Text(n, 5)) for n in range(3)]
    outcome, seen = run(workload_of("same", arrivals), cost=cost)
    waits = [
        one.times.submitted_ns - START_NS - n * 50_000_000
        for n, (one, _) in enumerate(seen.finishes.values())
    ]
    assert waits == [5_000_000, 0, 0]
    assert outcome.figures.images_encoded == 1
    videos = (Video("a", 5, 20), Video("a", 5, 20), Video("a", 7, 20), Video("b", 2, 20))
    turns = [
        arrival(number, 0, video, Text(number, 9), conversation="c", outputs=2)
        for number, video in enumerate(videos)
    ]
    figures = run(workload_of("turns", turns))[0].figures
    assert (figures.images, figures.images_encoded) == (19, 9)


@each_case(("encoder", "encoded"), [("false", 1), ("true", 3)])
def test_run_adapters_share_no_blocks_and_images_where_they_do_not_change_them(
    encoder: str, encoded: int
) -> None:
    """Two requests with each of two adapters and with none, one after the other."""
    arrivals = [
        arrival(number, 500 * number, Image("a", 40), Text(1, 40), adapter=adapter)
        for number, adapter in enumerate(["", "one", "two"] * 2)
    ]
    sets = [f"adapters.encoder={encoder}", "adapters.count_max=2"]
    figures = run(workload_of("adapters", arrivals), *sets)[0].figures
    assert figures.finished == 6
    assert figures.prefix_hits == pytest.approx(3 * 64 / (6 * 80)), "four blocks of each second one"
    assert figures.images_encoded == encoded


def test_run_size_of_the_kv_cache() -> None:
    """As given, otherwise as pinned, otherwise from the cost model; otherwise unknown."""
    pinned = config('generate.memory={use="pinned", tokens=160}')
    assert prepare(pinned, COST, kv_tokens=320).limits.blocks == 20
    assert prepare(pinned, COST).limits.blocks == 10
    in_bytes = 'generate.memory={use="pinned", bytes=20480}'  # on each rank
    assert prepare(config(in_bytes), COST).limits.blocks == 20
    assert prepare(config(in_bytes, "generate.tensor_parallel=2"), COST).limits.blocks == 40
    assert prepare(config(), COST).limits.blocks == 256
    with pytest.raises(ConfigError, match="holds no block"):
        prepare(config(), COST, kv_tokens=15)
    with pytest.raises(ConfigError, match="--kv-tokens"):
        prepare(config(), msgspec.structs.replace(COST, kv_tokens=0))


def test_run_needs_a_shape_and_policies_that_fit_their_tables() -> None:
    shapeless = msgspec.structs.replace(COST, shape=None)
    with pytest.raises(ConfigError, match="neither a checkpoint nor the cost model"):
        prepare(config(), shapeless)
    assert prepare(config(), shapeless, info=TINY, kv_tokens=160).info is TINY
    two: dict[str, Policy] = dict.fromkeys(["arrival", "generate.admission"], TenantFair())
    two |= dict.fromkeys(["encode.admission", "generate.step"], TenantFair())
    with pytest.raises(PolicyError, match="an object of its own for each table"):
        simulate(config(), workload_of("none", []), cost=COST, policies=two)
    with pytest.raises(ConfigError, match="not a policy table"):
        prepare(config(), COST, policies={"encode": Reversed()})
    with pytest.raises(PolicyError, match="not a subclass of vsched.policy.RoutingPolicy"):
        prepare(config(), COST, policies={"routing": Reversed()})


def test_run_goodput_counts_requests_within_both_targets() -> None:
    """The own target of a request comes first."""

    def share(targets: Targets) -> float:
        outcome = simulate(config(*SCARCE), scarce(1), cost=COST, targets=targets)
        return outcome.figures.good_share

    assert share(Targets(ttft_ms=float("inf"), tpot_ms=float("inf"))) == 1.0
    assert share(Targets(ttft_ms=0)) == 0.0
    assert share(Targets(tpot_ms=0)) < 0.2, "requests of one token have no time a token"
    assert 0 < share(Targets(ttft_ms=150)) < 1
    arrivals = [arrival(n, 0, Text(n, 50), ttft_target_ms=n * 100_000) for n in range(2)]
    assert run(workload_of("two", arrivals))[0].figures.good_share == 0.5


def test_run_with_a_policy_of_ones_own_checks_the_order_of_that() -> None:
    """The configured `fifo` that was replaced is not checked; a `fifo` that replaces another policy is."""
    plain = simulate(config(*SCARCE), scarce(1), cost=COST)
    policies = {"generate.admission": Reversed()}
    own = simulate(config(*SCARCE), scarce(1), cost=COST, policies=policies, oracles=True)
    assert own.policies["generate.admission"] == "Reversed()"
    assert own.digest != plain.digest
    assert own.figures.finished == 40
    assert not own.figures.policy_faults
    other = config(*SCARCE, "generate.admission.use=priority")
    setup = prepare(other, COST, policies={"generate.admission": Fifo()})
    assert Oracles(setup)._fifo
    assert not Oracles(prepare(other, COST))._fifo
    replaced = Oracles(setup)
    table = {"use": "tenant-fair", "seats": ["generate.admission", "generate.step"]}
    replaced._take_event(PolicyReplaced(tables={"policy": table}))
    assert not replaced._fifo, "the table `policy` replaces it, too"


def test_run_limits_follow_from_the_policies_that_decide() -> None:
    budget = TokenBudget(max_tokens=64, max_items=3)
    setup = prepare(config(), COST, policies={"encode.admission": budget})
    assert setup.policies.by_table["encode.admission"] is budget
    assert (setup.item_tokens_max, setup.limits.encode_items) == (64, 3)
    assert prepare(config(), COST).item_tokens_max > 64


def test_run_counts_refusals_by_tenant_and_reason() -> None:
    """Reasons that differ only in their numbers count as one."""
    arrivals = [arrival(n, n, tenant="ab"[n % 2]) for n in range(12)]
    limited = config("arrival={use='tenant-fair',rate=1,burst=1,rates={a=1000}}")
    figures = simulate(limited, workload_of("two", arrivals), cost=COST).figures
    assert figures.failed == {"shed": 5}
    assert figures.reasons == {"tenant b sends too fast": 5}
    assert figures.tenants["a"].failed == {}
    assert figures.tenants["b"].failed == {"shed": 5}
    assert figures.tenants["b"].finished == 1


def test_run_twice_is_the_same() -> None:
    one, same, other = (simulate(config(*SCARCE), scarce(seed), cost=COST) for seed in (5, 5, 6))
    assert one.digest == same.digest != other.digest
    assert (one.figures, one.cdf) == (same.figures, same.cdf)
    assert one.series == same.series
    noisy = msgspec.structs.replace(PLAIN, noise=0.2)
    digests = [simulate(config(), scarce(1), cost=noisy, seed=seed).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_a_video_is_prepared_by_one_thread_and_encoded_group_by_group() -> None:
    host = HostCost(image_ns=4_000_000)
    video = Video("a", 5, 50)
    workload = workload_of("one", [arrival(1, 0, video, Text(1, 50), outputs=1)])
    outcome, seen = run(workload, cost=with_host(host))
    prepared_ns, encoded_ns = 5 * 4_000_000, 5 * (2_000_000 + 4000 * 50)
    step_ns = 2_000_000 + 300 * 10_000 + 10 * 300 * 150
    assert seen.ttft_ns("r1") <= prepared_ns + encoded_ns + step_ns
    assert seen.ttft_ns("r1") > prepared_ns + encoded_ns
    assert outcome.figures.images_encoded == 5


@each_case("seed", range(4))
def test_sketch_quantiles_are_close(seed: int) -> None:
    rng, sketch = Random(seed), Sketch()
    values = [int(rng.lognormvariate(rng.uniform(2, 22), 2)) for _ in range(5000)]
    for value in values:
        sketch.add(value)
    for share in (0.5, 0.95, 0.99):
        exact = float(np.percentile(values, share * 100, method="inverted_cdf"))
        assert sketch.quantile(share) == pytest.approx(exact, rel=0.008, abs=1)
    assert sketch.mean == pytest.approx(np.mean(values), rel=0.005, abs=1)
    assert sketch.count == 5000


def test_sampler_keeps_a_bounded_number_of_samples_and_every_sum() -> None:
    sampler = Sampler(0)
    steps = 5 * SAMPLES_MAX + 7
    for step in range(1, steps + 1):
        totals = [step * (column + 1) for column in range(len(SUMS))]
        sampler.take_samples(step * SAMPLE_NS, (1.0, step, 0.0, 0.5, 0.0), totals)
    series = sampler.series()
    assert SAMPLES_MAX / 2 <= len(series.gauges["waiting"]) < SAMPLES_MAX
    taken = len(series.gauges["waiting"]) * series.interval_s * 1e9 / SAMPLE_NS
    assert sum(series.sums["steps"]) == taken
    assert sum(series.sums["decode_tokens"]) == 2 * taken
    assert set(series.gauges["waiting"]) == {1.0}
    assert series.gauges["running"] == sorted(series.gauges["running"])
