"""Adapters of a vision tower: the same embedding rows as in PEFT's own tower, with one adapter per image."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.parity.vision_architectures import VISION_ARCHITECTURES, images_of, save_model
from tests.workers.adapters.peft_adapters import make_whole_adapter
from tests.workers.driver import Checkpoints, Stage, Stages, values_of
from tests.workers.properties import usually
from tests.workers.test_vision import jobs_of, load_tower
from vsched.errors import CheckpointError
from vsched_workers.adapters.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adapter,
    LowRankPair,
    read_adapter,
)
from vsched_workers.adapters.layers import AdaptedModule
from vsched_workers.backends.reference.any_tower import AnyTower
from vsched_workers.families import FAMILIES
from vsched_workers.families.qwen_image import grid_of
from vsched_workers.plugin import TransformersPlugin

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def tower_of(stage: Stage) -> tuple[Any, AdaptedModule]:
    worker: Any = stage.encoder
    family = FAMILIES[stage.info.family]
    module = AdaptedModule(
        worker._tower.module,
        prefixes=family.vision_prefixes,
        others=family.language_prefixes,
        make_sums=worker._backend.prepare_adapters(),
        count_max=4,
        rank_max=5,
    )
    return worker._tower, module


@torch.inference_mode()
def test_images_have_the_rows_of_pefts_tower(
    stages: Stages, checkpoints: Checkpoints, tmp_path: Path, size: str
) -> None:
    """The language part of the file is skipped; the next image is encoded by the base model."""
    stage = stages(size)
    whole = make_whole_adapter(checkpoints(size), tmp_path, 1, r=2, use_rslora=True)
    tower, module = tower_of(stage)
    (job, *_) = jobs_of(stage)
    plain = tower.encode([job])
    module.add_adapter("one", read_adapter(tmp_path, rank_max=4))
    with module.all_rows("one"):
        found = tower.encode([job])
    out = whole.base_model.model.get_image_features(
        values_of([job.arrays]), torch.tensor([grid_of(job.metadata)]), return_dict=True
    )
    levels = [out.pooler_output[0], *(each[0] for each in getattr(out, "deepstack_features", ()))]
    torch.testing.assert_close(found, torch.cat(levels, -1), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, plain, atol=0.01)
    assert torch.equal(tower.encode([job]), plain)
    module.remove_adapter("one")
    assert torch.equal(tower.encode([job]), plain)


@torch.inference_mode()
def test_fused_blocks_with_adapters_equal_the_modules(
    stages: Stages, checkpoints: Checkpoints, tmp_path: Path, size: str
) -> None:
    exact, fused = (stages(size, kind, "bfloat16") for kind in ("exact", "auto"))
    jobs = jobs_of(exact)
    make_whole_adapter(checkpoints(size), tmp_path, 3)
    rows = []
    for stage in (exact, fused):
        tower, module = tower_of(stage)
        module.add_adapter("one", read_adapter(tmp_path, rank_max=4))
        plain = tower.encode(jobs)
        with module.all_rows("one"):
            rows.append((plain, tower.encode(jobs)))
        module.remove_adapter("one")
    (plain, wanted), (_, found) = rows
    apart = (found - wanted).abs().max()
    assert apart < 0.05 * wanted.abs().max() < (wanted - plain).abs().max()


@pytest.mark.parametrize("name", usually("llava", of=["idefics3", "internvl"]))
@torch.inference_mode()
def test_a_tower_of_any_architecture_has_the_rows_of_pefts(tmp_path: Path, name: str) -> None:
    """Crops and concatenated rows have the adapter of their image; names of the language model are skipped."""
    base = tmp_path / "base"
    base.mkdir()
    save_model(name, base)
    tower = load_tower(base, VISION_ARCHITECTURES[name].family or name)
    whole = make_whole_adapter(base, tmp_path / "adapter", 1)
    adapter = read_adapter(tmp_path / "adapter", rank_max=4)
    module = AdaptedModule(tower.module, count_max=1, rank_max=4)
    module.add_adapter("one", adapter)
    image = images_of(name)[0]
    plain = tower(image)
    with module.all_rows("one"):
        found = tower(image)
    torch.testing.assert_close(
        found, AnyTower(whole.base_model.model, torch.float32)(image), rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(found, plain, atol=0.01)
    language = [each for each in adapter.pairs if "language_model" in each or "text_model" in each]
    assert language, "the file has both parts"


def test_modules_of_neither_part_are_refused_by_name(stages: Stages) -> None:
    _, module = tower_of(stages("nano25"))
    pair = LowRankPair(torch.ones(1, 8), torch.ones(8, 1), 1.0)
    language = {"model.language_model.layers.0.self_attn.q_proj": pair}
    module.add_adapter("language alone", Adapter(language))
    assert module.names == ["language alone"]
    for name in ("model.visual.blocks.99.attn.qkv", "lm_head"):
        with pytest.raises(CheckpointError, match=f"changes {name}, which the model lacks"):
            module.add_adapter("one", Adapter({name: pair}))


@pytest.mark.parametrize(
    ("family", "names", "changes"),
    [
        ("qwen2_5_vl", ["model.language_model.layers.0.mlp.up_proj"], False),
        ("qwen2_5_vl", ["model.visual.blocks.0.attn.qkv"], True),
        ("llava", ["model.language_model.layers.0.mlp.up_proj"], False),
        ("llava", ["model.language_model.layers.0.x", "model.vision_tower.y"], True),
        ("idefics3", ["model.text_model.layers.0.x", "model.connector.proj"], True),
        ("llama", ["model.layers.0.mlp.up_proj"], False),
    ],
)
def test_image_resizing_is_known_before_a_model_is_loaded(
    tmp_path: Path, family: str, names: list[str], changes: bool
) -> None:
    given, kept = tmp_path / "given", tmp_path / "kept"
    given.mkdir()
    (given / CONFIG_FILE).write_text('{"peft_type": "LORA", "lora_alpha": 8}')
    sides = {"lora_A": torch.ones(2, 8), "lora_B": torch.ones(8, 2)}
    tensors = {
        f"base_model.model.{name}.{key}.weight": side.clone()
        for name in names
        for key, side in sides.items()
    }
    save_file(tensors, given / WEIGHTS_FILE)
    info: Any = SimpleNamespace(family=family, takes_images=family != "llama")
    facts = TransformersPlugin().keep_adapter(info, str(given), str(kept), rank_max=4)
    assert (facts.rank, facts.changes_encoder) == (2, changes)
