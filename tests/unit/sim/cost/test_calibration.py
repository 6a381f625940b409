"""Calibration recovers known costs from observations, whatever else slowed the engine down, and refuses bad input."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest

from tests.each_case import each_case
from vsched.errors import ConfigError
from vsched.sim.cost.calibration import (
    Observation,
    ObservedJob,
    ObservedRequest,
    ObservedStep,
    calibrate,
    predict,
    rehearsed,
    slower,
    slowness,
)
from vsched.sim.cost.model import (
    COST_MODELS,
    CostModel,
    EncodeCost,
    EncodeSample,
    GenerateCost,
    GenerateSample,
    HostCost,
    fit,
    load_cost_model,
    save_cost_model,
)

MS = 1_000_000
TRUE = CostModel(
    name="true",
    source="made up",
    encode=EncodeCost(step_ns=3e6, item_ns=2e5, token_ns=2e4, token_pair_ns=8.0),
    generate=GenerateCost(step_ns=3e6, decode_ns=8e4, context_ns=300, prefill_ns=6e4, pair_ns=35),
    host=HostCost(
        decision_ns=8e5, gap_ns=1e5, request_ns=2e5, token_ns=50, image_ns=1e6, pixel_ns=20
    ),
)


class Scene:
    """Composes observations of an engine with the true costs."""

    def __init__(self, *, noise: float = 0.0, seed: int = 0) -> None:
        self.now_ns = 1_000 * MS
        self.rounds_ns: list[int] = []
        self.steps: list[ObservedStep] = []
        self.jobs: list[ObservedJob] = []
        self.requests: list[ObservedRequest] = []
        self._rng = Random(seed)
        self._noise = noise

    def factor(self) -> float:
        return 1 + self._noise * self._rng.uniform(-1, 1)

    def step(self, sample: EncodeSample | GenerateSample, slow: float, *, idle: bool) -> None:
        took_ns = int(predict(TRUE, sample) * slow * self.factor())
        host = TRUE.host
        decided_ns = self.now_ns if idle else self.now_ns - 1
        self.now_ns += int(host.decision_ns if idle else host.gap_ns) + took_ns
        group = "encode" if isinstance(sample, EncodeSample) else "generate"
        seen = msgspec.structs.replace(sample, ns=float(took_ns))
        self.steps.append(
            ObservedStep(group=group, sample=seen, decided_ns=decided_ns, ended_ns=self.now_ns)
        )

    def request(self, tokens: int, pixels: int, slow: float) -> None:
        host, images = TRUE.host, int(pixels > 0)
        took_ns = host.request_ns + host.token_ns * tokens
        took_ns += images * (host.image_ns + host.pixel_ns * pixels)
        end_ns = self.now_ns + int(took_ns * slow * self.factor())
        if images:
            self.jobs.append(ObservedJob(self.now_ns, end_ns))
        sizes = {"tokens": tokens, "images": images, "pixels": pixels}
        times = {"received_ns": self.now_ns, "submitted_ns": end_ns}
        self.requests.append(ObservedRequest(**sizes, **times))
        self.now_ns = end_ns

    def round(self, slow: float = 1.0) -> None:
        """Let everything happen once, slowed down by something else."""
        self.rounds_ns.append(self.now_ns)
        for count in (1, 4, 16, 64):
            for context in (32, 512, 2048):
                for number in range(12):
                    sample = GenerateSample(decodes=count, context=count * (context + number), ns=1)
                    self.step(sample, slow, idle=number == 0)
        for tokens in (16, 100, 512):
            self.request(tokens, 0, slow)
            for start in (0, 1024):
                pairs = tokens * (start + tokens / 2)
                sample = GenerateSample(prefill=tokens, pairs=pairs, ns=1)
                self.step(sample, slow, idle=True)
        for items, tokens in ((1, 64), (1, 400), (1, 1600), (4, 400), (2, 1600)):
            self.request(20, 196 * tokens, slow)
            pairs = items * tokens**2
            encode = EncodeSample(items=items, tokens=items * tokens, pairs=pairs, ns=1)
            self.step(encode, slow, idle=True)

    def company(self, slowdown: float) -> None:
        """Let a long encoder step and many short generator steps slow each other down."""
        sample = EncodeSample(items=1, tokens=8000, pairs=8000**2, ns=1)
        start_ns, need_ns = self.now_ns, predict(TRUE, sample)
        self.step(sample, slowdown, idle=True)
        end_ns, self.now_ns = self.now_ns, start_ns
        while self.now_ns < end_ns - 0.02 * need_ns:
            self.step(GenerateSample(decodes=4, context=400, ns=1), slowdown, idle=False)
        self.now_ns = max(self.now_ns, end_ns)

    def observation(self) -> Observation:
        return Observation(
            rounds_ns=self.rounds_ns, steps=self.steps, jobs=self.jobs, requests=self.requests
        )


def rounds(*slow: float, noise: float = 0.0, company: float | None = None) -> Scene:
    scene = Scene(noise=noise)
    for one in slow:
        scene.round(one)
        if company is not None:
            scene.company(company)
    return scene


def found(scene: Scene, *, cores: int = 0) -> CostModel:
    return calibrate(scene.observation(), name="found", source="a scene", cores=cores)


def assert_close(model: CostModel, *, rel: float) -> None:
    for sample in (
        EncodeSample(items=2, tokens=900, pairs=500_000, ns=1),
        EncodeSample(items=1, tokens=1200, pairs=1_440_000, ns=1),
        GenerateSample(decodes=10, context=3000, ns=1),
        GenerateSample(decodes=40, context=90_000, ns=1),
        GenerateSample(decodes=3, context=900, prefill=300, pairs=100_000, ns=1),
    ):
        assert predict(model, sample) == pytest.approx(predict(TRUE, sample), rel=rel)


def test_calibrate_finds_exact_costs() -> None:
    model = found(rounds(1.0))
    assert_close(model, rel=0.001)
    for name in ("decision_ns", "gap_ns", "request_ns", "token_ns", "image_ns", "pixel_ns"):
        assert getattr(model.host, name) == pytest.approx(getattr(TRUE.host, name), rel=0.01)
    assert model.host.contention == ()
    assert model.noise < 0.01


def test_calibrate_finds_costs_in_noise_and_reports_how_far_off_it_is() -> None:
    model = found(rounds(1.0, 1.0, 1.0, noise=0.1))
    assert_close(model, rel=0.05)
    assert model.generate_error is not None
    assert 0.02 < model.generate_error.median < model.generate_error.p95 < 0.15
    assert 0.02 < model.noise < 0.1


def test_calibrate_leaves_out_rounds_that_were_disturbed() -> None:
    model = found(rounds(1.6, 1.0, 2.5, 1.01, noise=0.02))
    assert_close(model, rel=0.04)
    assert model.host.pixel_ns == pytest.approx(TRUE.host.pixel_ns, rel=0.1)
    assert model.encode_error is not None
    assert model.encode_error.p95 > 0.3  # the variation of their times remains visible


def test_calibrate_finds_the_cost_of_concurrent_requests() -> None:
    """Shared time on one core is not fitted: known contention distributes it."""
    scene = rounds(1.0, 1.0, noise=0.02, company=2.2)
    assert_close(found(scene), rel=0.05)
    for cores, contention in ((1, (1.0,)), (0, (1.0, 2.2)), (2, (1.0, 2.2)), (8, (1.0, 2.2))):
        assert found(scene, cores=cores).host.contention == pytest.approx(contention, rel=0.05)


def test_calibrate_reports_how_much_slower_a_machine_has_become() -> None:
    scene = rounds(1.3)
    expected = {"encode": 1.3, "generate": 1.3}
    assert slowness(TRUE, scene.observation()) == pytest.approx(expected, rel=0.01)
    sample = GenerateSample(decodes=3, context=10, prefill=5, pairs=10, ns=1)
    assert predict(slower(TRUE, 1.0, 1.3), sample) == pytest.approx(1.3 * predict(TRUE, sample))


def test_rehearsal_distinguishes_steps_on_cold_ranks() -> None:
    scene = Scene()
    scene.rounds_ns.append(scene.now_ns)
    for number in range(40):
        idle = number % 4 == 0
        sample = GenerateSample(decodes=3, context=900, ns=1)
        scene.step(sample, 1.3 if idle else 1.1, idle=idle)
    model = rehearsed(TRUE, scene.observation())
    assert model.host.cold == pytest.approx(1.3 / 1.1, rel=0.001)
    decode = GenerateSample(decodes=9, context=99, ns=1)
    assert predict(model, decode) == pytest.approx(1.1 * predict(TRUE, decode))
    image = EncodeSample(items=1, tokens=64, pairs=4096, ns=1)
    assert predict(model, image) == pytest.approx(1.1 * predict(TRUE, image))
    assert slowness(model, scene.observation()) == pytest.approx({"encode": 1.0, "generate": 1.0})


@each_case("took_ns", [0.0, -5.0, float("nan"), float("inf"), 1e12])
def test_calibrate_refuses_unmeasured_steps(took_ns: float) -> None:
    scene = rounds(1.0)
    sample = msgspec.structs.replace(scene.steps[5].sample, ns=took_ns)
    scene.steps[5] = msgspec.structs.replace(scene.steps[5], sample=sample)
    with pytest.raises(ConfigError, match=r"generate: a step of .* Remedy"):
        found(scene)


def test_calibrate_needs_to_see_everything() -> None:
    scene = rounds(1.0)
    for part, name in {"encode": "encoder", "generate": "generator"}.items():
        steps = [step for step in scene.steps if step.group != part]
        seen = msgspec.structs.replace(scene.observation(), steps=steps)
        with pytest.raises(ConfigError, match=f"no measured {name} steps"):
            calibrate(seen, name="found", source="a scene")
    scene.requests.clear()
    with pytest.raises(ConfigError, match="no request was seen"):
        found(scene)


def test_fit_has_no_negative_costs() -> None:
    """If longer contexts seem to make steps shorter, their cost is 0."""
    odd = [
        GenerateSample(decodes=count, context=100 * count, ns=5e6 + 1e4 * count - 20 * 100 * count)
        for count in range(1, 40)
    ]
    odd += [GenerateSample(decodes=count, context=count, ns=5e6 + 1e4 * count) for count in (1, 40)]
    encode = [EncodeSample(items=1, tokens=40, pairs=1600, ns=1e6)]
    found = fit([*odd, *encode], name="odd", source="samples")
    costs = [getattr(found.generate, field) for field in GenerateCost.__struct_fields__]
    assert min(costs) >= 0
    assert found.generate.context_ns == 0


def test_cost_model_by_name_or_from_a_file_or_a_clear_error(tmp_path: Path) -> None:
    assert load_cost_model("h100-7b") is COST_MODELS["h100-7b"]
    path = tmp_path / "cost.json"
    save_cost_model(COST_MODELS["tiny25"], path)
    assert load_cost_model(path) == COST_MODELS["tiny25"]
    with pytest.raises(ConfigError, match="h100-7b, tiny25"):
        load_cost_model("h200-7b")
    path.write_text('{"name": "x", "source": "", "encode": {"step_ns": -1}, "generate": {}}')
    with pytest.raises(ConfigError, match="step_ns"):
        load_cost_model(path)


def test_built_in_cost_models_say_all_that_a_simulation_needs() -> None:
    for model in COST_MODELS.values():
        assert model.shape is not None
        assert model.kv_tokens > 0
        assert "rough" in model.source
        many = model.generate_ns(decodes=64, context=64000)
        assert model.generate_ns(decodes=1, context=1000) < many
