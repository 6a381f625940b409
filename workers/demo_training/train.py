"""The training loop: the plan, batches, evaluation, and resuming of a stopped run.

Everything random is a function of the seed and the number of the step, so that the state of a run is its weights, the
optimizer's moments and that number. The same seed, steps, thread count, fonts and versions of torch and Pillow give the
same weights, regardless of interruptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, Dataset

from demo_training.batches import TrainingBatch, make_batch
from demo_training.drawing import COLOURS, DIGITS_MAX, OBJECT, OBJECTS_MAX, SHAPES
from demo_training.model import (
    IMAGE_TOKENS,
    MERGE,
    TEXT,
    encode,
    make_model,
    make_tokenizer,
    read_text,
    write_front_end,
    write_model,
)
from demo_training.samples import DrawnConversation, looking_samples, page_sample, train_sample
from vsched.errors import CheckpointError
from vsched_workers.checkpoint.facts import inspect_checkpoint
from vsched_workers.checkpoint.preprocess import QwenPreprocessor, load_preprocessor


@dataclass(frozen=True)
class Plan:
    """The settings that determine a run.

    Attributes:
        batch: Conversations per step.
        ramp: Steps over which the pictures get harder.
        opening: Steps over which the weight of the marks loss decreases.
        looking: Steps, from the first, of which only every fourth asks for answers. The others only find marks, in
            pictures that are full of them: a digit there costs a tenth, and answers require reading digits first.
        cooling: Share of the first round's steps, at its end, over which the learning rate decreases.
        again: Steps of a second round: the rate rises again, to `rewarmed` of its peak, and decreases; the pictures
            vary more than held-out ones (`docs/demo-model.md` has the reason).
        memory: Decay of the moving average of the weights per step.
        peak: The highest learning rate, of all parameters except the layers' matrices.
        matrix_peak: The highest learning rate of the layers' matrices.
        threads: Torch's threads; another number changes sums in the last bit.
    """

    seed: int = 0
    steps: int = 6500
    batch: int = 32
    threads: int = 2
    peak: float = 2e-3
    matrix_peak: float = 3e-3
    warmup: int = 100
    ramp: int = 800
    opening: int = 1600
    looking: int = 1200
    cooling: float = 0.4
    again: int = 1600
    rewarmed: float = 0.4
    varied: float = 1.1
    decay: float = 0.02
    clip: float = 1.0
    memory: float = 0.998

    @property
    def total(self) -> int:
        """The steps of both rounds."""
        return self.steps + self.again

    @property
    def plateau(self) -> int:
        """The step up to which nothing depends on the number of steps."""
        return int(self.steps * (1 - self.cooling))

    def rate(self, step: int) -> float:
        """Return the current share of the peak learning rates: a linear rise, a plateau, and a linear fall to zero."""
        if step < min(self.warmup, self.plateau):
            return (step + 1) / self.warmup
        if step >= self.steps:
            return self.rewarmed * (1 - (step - self.steps) / self.again)
        left = (self.steps - step) / max(1, self.steps - self.plateau)
        return min(1.0, left)

    def difficulty(self, step: int) -> float:
        """Return the maximum difficulty of a step's pictures: 0 to 1, and `varied` in the second round."""
        return self.varied if step >= self.steps else min(1.0, step / self.ramp)

    def mark_weight(self, step: int) -> float:
        """Return the weight of the marks loss, which dominates at the beginning."""
        return max(0.25, 1 - 0.75 * step / self.opening)

    def asks(self, step: int) -> bool:
        """Return whether a step asks for answers; otherwise it only finds marks."""
        return step % 4 == 0 or step >= self.looking


STATE = "training-state.pt"
DRAWN_WITHIN_S = 300.0
"""A process that imports torch on a busy machine takes a while before its first batch."""
_DIGIT_CLASSES, _COUNT_CLASSES = 11, OBJECTS_MAX + 1
_MARK_CLASSES = (
    *(DIGITS_MAX * _DIGIT_CLASSES, MERGE * MERGE * _DIGIT_CLASSES),
    *(len(COLOURS) + 1, len(SHAPES) + 1, _COUNT_CLASSES),
)


@dataclass
class Progress:
    """The progress of a run, with its losses and accuracies."""

    step: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float, float]] = field(default_factory=list)
    accuracies: list[tuple[int, dict[str, float]]] = field(default_factory=list)


class BatchMaker(Dataset[TrainingBatch]):
    """Makes the training batch of a step: a function of the plan and the step's number.

    Args:
        directory: The checkpoint, whose preprocessing resizes and tokenizes as in serving.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory

    @cached_property
    def front(self) -> QwenPreprocessor:
        """The preprocessing, which a process that draws loads itself."""
        return load_front(self.directory)

    def __getitem__(self, step: int) -> TrainingBatch:
        return make_batch(self.samples(step), self.front)

    def ahead(self, steps: range) -> Iterator[TrainingBatch]:
        """Yield the batches of steps, each drawn in another process during the step before.

        Drawing takes one core a sixth of a step, and training seldom keeps two cores busy.
        """
        drawn: DataLoader[TrainingBatch] = DataLoader(
            self,
            batch_size=None,
            sampler=steps,
            num_workers=1,
            prefetch_factor=1,
            timeout=DRAWN_WITHIN_S,
            multiprocessing_context="spawn",
        )
        return iter(drawn)

    def samples(self, step: int) -> list[DrawnConversation]:
        """Draw the conversations of a step; steps that only find marks have no questions."""
        plan = self.plan
        rng = np.random.default_rng([plan.seed, step])
        most = plan.difficulty(step)
        if not plan.asks(step):
            return looking_samples(rng, most)

        def hard() -> float:
            return most * float(rng.uniform(0.5, 1.0)) if rng.random() < 0.4 else most

        pages = [page_sample(rng, hard()) for _ in range(plan.batch // 8)]
        return pages + [train_sample(rng, hard()) for _ in range(plan.batch)]


class Trainer:
    """One run in one directory; it continues from the state in it.

    Raises:
        CheckpointError: When the directory's state belongs to another plan, or there is none but something else.
    """

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.directory = directory
        self.plan = plan
        self.progress = Progress()
        torch.set_num_threads(plan.threads)
        directory.mkdir(parents=True, exist_ok=True)
        started = (directory / STATE).exists()
        if not started and any(directory.iterdir()):
            raise CheckpointError(
                f"{directory} holds no run to go on with ({STATE}), but other files. "
                "Remedy: give an empty folder, or one that is not there yet."
            )
        tokenizer = make_tokenizer()
        write_front_end(directory, tokenizer)
        self.model = make_model(tokenizer, plan.seed)
        self.model.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed + 1)
            # Predicts the content of each image token; trained along, and not part of the checkpoint.
            self.marks = nn.Linear(int(str(TEXT["hidden_size"])), sum(_MARK_CLASSES))
        named = {f"model.{name}": value for name, value in self.model.named_parameters()}
        named |= {f"marks.{name}": value for name, value in self.marks.named_parameters()}
        self._parameters: dict[str, nn.Parameter] = named
        self._average = {name: value.detach().clone() for name, value in named.items()}
        self._optimisers = optimisers(plan, named)
        if started:
            self._load()
            # The checkpoint may have been partly written when the run was killed; its state never is.
            self.write()
        else:
            self.save()
        self.batches = BatchMaker(plan, directory)
        self.front = self.batches.front

    def step(self, batch: TrainingBatch | None = None) -> float:
        """Train on one batch, by default the step's own; return the loss of the answers."""
        plan, step = self.plan, self.progress.step
        batch = batch or self.batches[step]
        for optimiser, peak in zip(self._optimisers, (plan.peak, plan.matrix_peak), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * plan.rate(step)
        embeddings = encode(self.model.model.visual, batch.vision)
        marks = marks_loss(self.marks(embeddings), batch)
        if plan.asks(step):
            answers = answers_loss(self.model, embeddings, batch)
            (answers + plan.mark_weight(step) * marks).backward()
            loss = float(answers.detach())
        else:
            marks.backward()
            loss = self.progress.losses[-1][1]
        parameters = list(self._parameters.values())
        nn.utils.clip_grad_norm_(parameters, plan.clip)
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            memory = min(plan.memory, (step + 1) / (step + 10))
            for name, value in self._parameters.items():
                self._average[name].lerp_(value, 1 - memory)
        self.progress.step += 1
        self.progress.losses.append((step + 1, loss, float(marks.detach())))
        return loss

    def averaged(self) -> dict[str, torch.Tensor]:
        """Return the averaged weights of the model, which are written, measured and served."""
        cut = len("model.")
        return {n[cut:]: v for n, v in self._average.items() if n.startswith("model.")}

    def measure(self, batches: Mapping[str, Sequence[TrainingBatch]]) -> dict[str, tuple[int, int]]:
        """Return right answers and questions of each named set, with the averaged weights."""
        model = self.served()
        return {name: count_right(model, part) for name, part in batches.items()}

    def served(self) -> Any:
        """Return a model with the averaged weights, rounded as they are written."""
        model = make_model(make_tokenizer(), self.plan.seed)
        rounded = {n: v.to(torch.bfloat16).to(torch.float32) for n, v in self.averaged().items()}
        model.load_state_dict(rounded, strict=False)
        return model.eval()

    def write(self) -> None:
        """Write the checkpoint, complete and ready to be served."""
        write_model(self.directory, self.model, self.averaged())

    def save(self) -> None:
        """Write the checkpoint and the state for resuming the run."""
        self.write()
        state = {
            "plan": asdict(self.plan),
            "progress": asdict(self.progress),
            "now": {name: value.detach() for name, value in self._parameters.items()},
            "average": self._average,
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
        }
        path = self.directory / STATE
        fresh = path.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(path)

    def _load(self) -> None:
        state = torch.load(self.directory / STATE)
        if state["plan"] != asdict(self.plan):
            raise CheckpointError(
                f"{STATE} belongs to a run of another plan: {state['plan']}. "
                "Remedy: give the same options, or another directory."
            )
        with torch.no_grad():
            for name, value in self._parameters.items():
                value.copy_(state["now"][name])
        self._average = state["average"]
        for optimiser, kept in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        self.progress = Progress(**state["progress"])


def optimisers(
    plan: Plan, named: Mapping[str, nn.Parameter]
) -> tuple[torch.optim.AdamW, torch.optim.Muon]:
    """Return the optimizers: Muon for the layers' matrices, AdamW for all other parameters."""
    outside = ("embed", "marks")
    matrices = {
        name: value
        for name, value in named.items()
        if value.ndim == 2 and not any(part in name for part in outside)
    }
    rest = [value for name, value in named.items() if name not in matrices]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": plan.decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=plan.peak,
        betas=(0.9, 0.98),
        fused=True,
    )
    muon = torch.optim.Muon(
        matrices.values(),
        lr=plan.matrix_peak,
        weight_decay=plan.decay,
        # A step then has the size of AdamW's, so that both take learning rates of the same size.
        adjust_lr_fn="match_rms_adamw",
    )
    return adam, muon


def load_front(directory: Path) -> QwenPreprocessor:
    """Load the preprocessing as a server does: training uses the same pixels as serving."""
    info = inspect_checkpoint(str(directory), dtype="float32", item_tokens_max=0)
    assert info.item_tokens_max >= IMAGE_TOKENS[1]
    front = load_preprocessor(info)
    assert isinstance(front, QwenPreprocessor)
    return front


def answers_loss(model: Any, embeddings: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
    """Return the loss of the answers, a mean over their tokens."""
    parts = [
        F.cross_entropy(logits, answers, reduction="sum")
        for logits, answers, _ in answer_logits(model, embeddings, batch)
    ]
    return torch.stack(parts).sum() / sum(len(rows.answers) for rows in batch.buckets)


def answer_logits(
    model: Any, embeddings: torch.Tensor, batch: TrainingBatch
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield, for each bucket, the logits before each answer token, that token, and its turn."""
    weight = model.model.language_model.embed_tokens.weight
    for rows in batch.buckets:
        flat = F.embedding(rows.ids.view(-1), weight)
        flat = flat.index_copy(0, rows.image_places, embeddings[rows.image_rows])
        hidden = read_text(model, flat.view(*rows.ids.shape, -1), rows.positions)
        yield model.lm_head(hidden.flatten(0, 1)[rows.requested]), rows.answers, rows.turns


def marks_loss(logits: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
    """Return the loss of predicting, per image token, the digits and objects centered in it and the object count."""
    slots, quarters, colours, shapes, counts = logits.split(_MARK_CLASSES, dim=1)
    tokens, none = len(logits), _DIGIT_CLASSES - 1
    place, quarter, slot, value, shape = batch.marks.unbind(1)
    is_digit, is_object = slot != OBJECT, slot == OBJECT
    in_slot = torch.full((tokens, DIGITS_MAX), none)
    in_slot[place[slot >= 0], slot[slot >= 0]] = value[slot >= 0]
    in_quarter = torch.full((tokens, MERGE * MERGE), none)
    in_quarter[place[is_digit], quarter[is_digit]] = value[is_digit]
    things = place[is_object]
    colour = torch.full((tokens,), len(COLOURS)).index_put_((things,), value[is_object])
    kind = torch.full((tokens,), len(SHAPES)).index_put_((things,), shape[is_object])
    loss = F.cross_entropy(counts, batch.counts)
    ordered = ~batch.loose
    for part, target, nothing in (
        (slots[ordered].reshape(-1, _DIGIT_CLASSES), in_slot[ordered].view(-1), none),
        (quarters.reshape(-1, _DIGIT_CLASSES), in_quarter.view(-1), none),
        (colours, colour, len(COLOURS)),
        (shapes, kind, len(SHAPES)),
    ):
        each = F.cross_entropy(part, target, reduction="none")
        there = (target != nothing).to(each.dtype)
        # Most tokens are empty: the others have the same total weight.
        loss = loss + each.mean() + (each * there).sum() / there.sum().clamp(min=1)
    return loss


@torch.no_grad()
def count_right(model: Any, batches: Sequence[TrainingBatch]) -> tuple[int, int]:
    """Return the numbers of answers with all tokens right, including the stop token, and of all answers.

    Every token is predicted after the right ones before it. Greedy generation is right exactly if all of these are.
    """
    right = total = 0
    for batch in batches:
        embeddings = encode(model.model.visual, batch.vision)
        for logits, answers, turns in answer_logits(model, embeddings, batch):
            wrong = turns[logits.argmax(dim=-1) != answers]
            requested = turns.unique()
            total += len(requested)
            right += len(requested) - len(wrong.unique())
    return right, total


def held_out_batches(
    samples: Sequence[DrawnConversation], front: QwenPreprocessor, *, size: int = 50
) -> list[TrainingBatch]:
    """Make batches of samples for evaluation."""
    return [make_batch(samples[at : at + size], front) for at in range(0, len(samples), size)]
