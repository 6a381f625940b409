"""Cost models: step times are arithmetic, and fitting recovers the coefficients."""

from __future__ import annotations

from pathlib import Path

import pytest

from vsched.errors import ConfigError
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

ENCODE = EncodeCost(step_ns=2e6, item_ns=3e5, token_ns=16e3, token_pair_ns=8.0)
GENERATE = GenerateCost(step_ns=5e6, decode_ns=2e4, context_ns=15, prefill_ns=4e4, pair_ns=2)
TRUE = CostModel(name="true", source="made up", encode=ENCODE, generate=GENERATE)


def test_cost_of_steps_is_the_sum_of_parts() -> None:
    assert TRUE.encode_ns([10, 20]) == 2e6 + 2 * 3e5 + 30 * 16e3 + 8 * (10**2 + 20**2)
    step_ns = TRUE.generate_ns(decodes=3, context=100, prefill=7, pairs=11)
    assert step_ns == 5e6 + 3 * 2e4 + 100 * 15 + 7 * 4e4 + 11 * 2
    host = CostModel(
        name="",
        source="",
        encode=ENCODE,
        generate=GENERATE,
        host=HostCost(image_ns=5, pixel_ns=2),
        pixels_per_token=400,
    )
    assert host.image_ns(3) == 5 + 2 * 3 * 400


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


def test_cost_model_reads_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "cost.json")
    save_cost_model(COST_MODELS["tiny25"], path)
    assert load_cost_model(path) == COST_MODELS["tiny25"]


def test_cost_model_by_name_or_a_clear_error(tmp_path: Path) -> None:
    assert load_cost_model("h100-7b") is COST_MODELS["h100-7b"]
    with pytest.raises(ConfigError, match="h100-7b, tiny25"):
        load_cost_model("h200-7b")
    path = tmp_path / "cost.json"
    path.write_text('{"name": "x", "source": "", "encode": {"step_ns": -1}, "generate": {}}')
    with pytest.raises(ConfigError, match="step_ns"):
        load_cost_model(str(path))


@pytest.mark.parametrize("name", COST_MODELS)
def test_built_in_cost_models_say_all_that_a_simulation_needs(name: str) -> None:
    model = COST_MODELS[name]
    assert model.shape is not None
    assert model.kv_tokens > 0
    assert "rough" in model.source
    assert model.generate_ns(decodes=1, context=1000) < model.generate_ns(decodes=64, context=64000)
