"""Shares of ranks: slices, mixtures of experts, tensor parallelism by transformers' plan; refused models."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.each_case import each_case
from tests.parity.architectures import ARCHITECTURES, COMMON, make_checkpoint
from tests.parity.compare import OUTPUTS, generated, prompts
from tests.workers.driver import (
    Checkpoints,
    Driver,
    Question,
    Stage,
    Stages,
    drawn_image,
    inspect,
    load_encoder,
    load_generator,
    outputs,
)
from tests.workers.edited import copy_of, write
from tests.workers.parallel import ranks as on_rank
from tests.workers.parallel.ranks import Ranks
from tests.workers.properties import thorough
from vsched.errors import CheckpointError
from vsched.worker.contract import WorkerSettings
from vsched_workers.checkpoint import random_init
from vsched_workers.families import FAMILIES
from vsched_workers.families.sharing import Sharing, parallel_plan
from vsched_workers.parallel import experts
from vsched_workers.parallel.experts import (
    BALANCE,
    Placement,
    SharedExperts,
    max_rows,
    next_placement,
)
from vsched_workers.parallel.slicing import PlannedRanks, share_by_plan, slice_module
from vsched_workers.plugin import plugin

SIZE = "nano3moe"
FURTHER = ("deepseek_v3", "gemma2", "llama", "mistral", "olmo2", "phi3", "qwen3", "starcoder2")


@each_case("seed", range(20))
def test_next_placement_is_one_of_all_experts_and_never_worse(seed: int) -> None:
    """Every rank keeps its number of experts, each expert has one rank, experts that stay keep their place."""
    draw = random.Random(seed)
    ranks, share = draw.choice([2, 4]), draw.randint(1, 6)
    order = draw.sample(range(ranks * share), ranks * share)
    current = [order[rank * share : (rank + 1) * share] for rank in range(ranks)]
    rows = [draw.choice([0, 1, 5, 90]) for _ in order]
    found = next_placement(rows, current)
    assert sorted(expert for own in found for expert in own) == sorted(order)
    assert [len(own) for own in found] == [share] * ranks
    assert max_rows(rows, found) <= max_rows(rows, current)
    assert found == next_placement(list(rows), [list(own) for own in current])
    for before, after in zip(current, found, strict=True):
        assert [x for x in before if x in after] == [
            x for x, y in zip(before, after, strict=True) if x == y
        ]


def test_next_placement_moves_nothing_without_gain() -> None:
    current: Placement = [[3, 0], [2, 1]]
    assert next_placement([5, 5, 5, 5], current) is current
    # Each rank keeps the group with the larger overlap: two experts move, not four.
    found = next_placement([9, 8, 7, 1, 1, 1], [[1, 4, 5], [0, 2, 3]])
    assert found == [[1, 2, 5], [0, 4, 3]]


@pytest.mark.slow
def test_load_takes_both_layouts(stages: Stages, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Published checkpoints have the last two dimensions of experts swapped."""
    path = copy_of(checkpoints(SIZE), tmp_path)
    weights = load_file(path / "model.safetensors")
    flipped = [name for name in weights if ".experts." in name]
    assert len(flipped) == 4
    for name in flipped:
        weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, path / "model.safetensors")
    mine: Any = stages(SIZE).generator
    theirs: Any = Stage.load(path).generator
    pairs = zip(mine.module.parameters(), theirs.module.parameters(), strict=True)
    assert all(torch.equal(one, another) for one, another in pairs)


def test_one_rank_has_nothing_to_balance(stages: Stages) -> None:
    assert [stages(size).generator.hooks() for size in (SIZE, "nano3")] == [{}, {}]


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_check_parallel_counts_experts(checkpoints: Checkpoints, tmp_path: Path, key: str) -> None:
    plugin.check_parallel(inspect(checkpoints(SIZE)), stage="generate", ranks=2)
    path = copy_of(checkpoints(SIZE), tmp_path, text_config={"num_local_experts": None})
    write(path / "config.json", {"text_config": {key: 7}})
    with pytest.raises(CheckpointError, match="num_experts is 7, which 2 ranks"):
        plugin.check_parallel(inspect(path), stage="generate", ranks=2)


def balanced_answer(
    settings: WorkerSettings, path: str, questions: Sequence[Question], every: int
) -> tuple[list[list[int]], list[Placement], dict[str, Any]]:
    """Run questions and rebalance after every `every` steps; return tokens, placements and observations."""
    stage = on_rank.load(settings, path)
    worker: Any = stage.generator
    layers = [each for each in worker.module.modules() if isinstance(each, SharedExperts)]
    driver = on_rank.driver_of(settings, stage, 40)
    step, steps = driver.step, 0
    placements = [list(layers[0].placement)]
    seen: dict[str, Any] = {"hooks": dict(worker.hooks()), "weights": worker.weights_bytes}
    seen["experts"] = sum(each.numel() * 4 for each in layers[0].parameters())

    def counted(active: Any) -> None:
        nonlocal steps
        step(active)
        steps += 1
        if steps % every == 0:
            worker.run_hook(BALANCE)
            assert not worker._balance._counts().any()
            placements.append(list(layers[0].placement))

    driver.step = functools.partial(counted)  # type: ignore[method-assign]
    running = driver.run(questions, arrivals=2, preempts=7)
    return outputs(running), placements, seen


@pytest.mark.slow
def test_experts_move_and_the_tokens_stay(
    ranks: Ranks, checkpoints: Checkpoints, stages: Stages
) -> None:
    """Collective work between two steps; experts change ranks, and no token changes."""
    questions = [Question("What is it?", [drawn_image(1, 90, 60)]), Question("How many are there?")]
    alone = Driver(stages(SIZE), chunk=40, seed=40).run(questions, arrivals=2, preempts=7)
    first, second = ranks.run(balanced_answer, str(checkpoints(SIZE)), questions, 4)
    assert first[0] == second[0] == outputs(alone)
    assert first[1] == second[1]
    assert len({str(placement) for placement in first[1]}) > 2
    assert first[2]["hooks"] == {BALANCE: experts.INTERVAL_S}
    layer: Any = stages(SIZE).generator.module.layers[0].mlp.experts  # type: ignore[attr-defined]
    assert first[2]["experts"] * 2 == sum(each.numel() * 4 for each in layer.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("cohere", 2),
        ("mixtral", 2),
        *thorough(*((name, 2) for name in (*FURTHER, "qwen3_moe"))),
        *thorough(("deepseek_v3", 4), ("mixtral", 4)),
    ],
)
def test_ranks_answer_as_generate(ranks: Ranks, tmp_path: Path, name: str, size: int) -> None:
    """Split heads, experts, inputs, gathered results, biases; some have a decoder description, with its own table."""
    make_checkpoint(name, tmp_path, **({"num_key_value_heads": 4} if size == 4 else {}))
    plugin.check_parallel(inspect(tmp_path), stage="generate", ranks=size)
    questions = [Question(prompt, count=OUTPUTS) for prompt in prompts()]
    found = ranks.run(on_rank.answer_text, str(tmp_path), questions, size=size)
    assert found == [generated(tmp_path, prompts())] * size


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cohere", *thorough("deepseek_v3", "mixtral", "phi3", "starcoder2")]
)
def test_ranks_have_the_same_tokens_in_bfloat16(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Packed linear layers still sum over ranks; tokens are close to those of one rank, which rounds once."""
    make_checkpoint(name, tmp_path)
    questions = [Question(prompt, count=OUTPUTS) for prompt in prompts()]
    found = ranks.run(on_rank.answer_text, str(tmp_path), questions, "bfloat16")
    alone = on_rank.answer_text(WorkerSettings(threads=1), str(tmp_path), questions, "bfloat16")
    assert found[0] == found[1]
    firsts = [answer[0] for answer in found[0]], [answer[0] for answer in alone]
    assert sum(one == other for one, other in zip(*firsts, strict=True)) > len(questions) // 2


def built(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[name](**COMMON, **ARCHITECTURES[name])
        )


@pytest.mark.parametrize(("name", "shares"), [("cohere", True), ("olmo2", False)])
def test_whether_ranks_share_the_cache_follows_from_the_plan(
    tmp_path: Path, name: str, shares: bool
) -> None:
    make_checkpoint(name, tmp_path)
    assert inspect(tmp_path).shares_kv is shares


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("stablelm", 2, "no plan for tensor parallelism"),
        ("qwen3_next", 2, "layers with a state"),
        ("cohere", 3, "num_attention_heads is 4, .* one of 1, 2."),
    ],
)
def test_models_that_ranks_cannot_share_are_refused_before_the_start(
    tmp_path: Path, name: str, ranks: int, message: str
) -> None:
    make_checkpoint(name, tmp_path)
    with pytest.raises(CheckpointError, match=f"{message}.*"):
        plugin.check_parallel(inspect(tmp_path), stage="generate", ranks=ranks)


def test_unknown_entry_of_a_plan_is_refused() -> None:
    config = built("cohere").config
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "sideways"}
    with pytest.raises(CheckpointError, match="entries sideways. Remedy: "):
        parallel_plan(config, "it")


def test_parameters_that_the_plan_is_silent_about_are_refused() -> None:
    """They may concern all heads, or be added by each rank."""
    model = built("cohere")
    model.model.layers[2].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(CheckpointError, match="nothing of layers.2.self_attn.sinks"):
        share_by_plan(model, parallel_plan(model.config, "it"), "it", PlannedRanks(ranks=2, rank=0))


def test_size_that_does_not_divide_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    make_checkpoint("cohere", tmp_path, intermediate_size=97)
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    info = inspect(tmp_path)
    settings = WorkerSettings(ranks=2, rank=0, rendezvous=str(tmp_path / "group"))
    with pytest.raises(CheckpointError, match="97 entries in 1 parts, which 2 ranks cannot"):
        load_generator(info, settings)


def build(checkpoints: Checkpoints, size: str, stage: str) -> tuple[nn.Module, Sharing]:
    family, path = FAMILIES[random_init.SIZES[size].family], str(checkpoints(size))
    with torch.device("meta"):
        if stage == "encode":
            return family.build_vision(path, "sdpa"), family.vision_sharing
        return family.build_language(path, "sdpa"), family.language_sharing


class Counted:
    """A file or tensor of safetensors, which counts the bytes that are read of each tensor."""

    def __init__(self, source: Any, read: dict[str, int], name: str = "") -> None:
        self._source, self._read, self._name = source, read, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._source, attribute)

    def __enter__(self) -> Any:
        return Counted(self._source.__enter__(), self._read)

    def __exit__(self, *arguments: object) -> None:
        self._source.__exit__(*arguments)

    def get_slice(self, name: str) -> Any:
        return Counted(self._source.get_slice(name), self._read, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[:]  # type: ignore[no-any-return]

    def __getitem__(self, key: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._source[key]
        self._read[self._name] = self._read.get(self._name, 0) + tensor.nbytes
        return tensor


def count_reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    opened: Any = safetensors.safe_open
    read: dict[str, int] = {}
    monkeypatch.setattr(
        safetensors, "safe_open", lambda *given, **options: Counted(opened(*given, **options), read)
    )
    return read


@pytest.mark.parametrize("stage", ["encode", "generate"])
def test_ranks_read_and_hold_their_share_only(
    checkpoints: Checkpoints, size: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reads and holds exactly half of the tensors in the table and all others."""
    module, sharing = build(checkpoints, size, stage)
    cuts = slice_module(module, sharing, ranks=2, rank=0)
    whole, _ = build(checkpoints, size, stage)
    total = {name: each.numel() * 4 for name, each in whole.state_dict().items()}
    shared = sum(total[name] for name in cuts)
    wanted = sum(total.values()) - shared // 2
    in_full = ("norm", "ln_q", "embed", "proj.bias", "fc2.bias", "mlp.2.bias")
    assert all(any(word in name for word in in_full) for name in total if name not in cuts)
    info = inspect(checkpoints(size))
    load = load_encoder if stage == "encode" else load_generator
    read: list[dict[str, int]] = []
    for rank in range(2):
        counts = count_reads(monkeypatch)
        worker = load(info, ranks=2, rank=rank, rendezvous="/nowhere/else")
        monkeypatch.undo()
        assert worker.weights_bytes == wanted
        assert sum(counts.values()) == wanted
        read.append(counts)
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("stage", "ranks", "words"),
    [
        ("generate", 4, ["num_key_value_heads is 2", "tensor_parallel to one of 1, 2."]),
        ("generate", 3, ["num_attention_heads is 4", "num_key_value_heads is 2", "3 ranks cannot"]),
        ("encode", 4, ["vision_config.num_heads is 2", "encode.tensor_parallel to one of 1, 2."]),
        ("encode", 5, ["num_heads is 2", "hidden_size is 32", "intermediate_size is 48"]),
    ],
)
def test_check_parallel_names_sizes_that_do_not_divide(
    checkpoints: Checkpoints, size: str, stage: str, ranks: int, words: list[str]
) -> None:
    info = inspect(checkpoints(size))
    for fits in (1, 2):
        plugin.check_parallel(info, stage=stage, ranks=fits)
    with pytest.raises(CheckpointError) as caught:
        plugin.check_parallel(info, stage=stage, ranks=ranks)
    assert all(word in str(caught.value) for word in words), caught.value
