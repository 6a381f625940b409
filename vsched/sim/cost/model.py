"""Linear cost models of encoder and generator steps, fitted to measured steps.

A step's time is a sum of terms, each proportional to a size in its decision. The model is fitted by
weighted linear least squares: on relative errors (a step of 2 ms counts as much as one of 2 s),
with non-negative coefficients (more work never makes a step shorter), and with decreasing weights
for steps delayed by other causes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from vsched.errors import ConfigError
from vsched.types import ModelInfo

Nanoseconds = Annotated[float, Meta(ge=0)]
FIT_ROUNDS = 10
LATE_WEIGHT = 0.3
"""Initial weight of samples slower than the prediction."""
FAR = 0.4
"""Relative error from which a sample has weight zero."""
HELD_UP = 3.0
"""Limit for the time of a step in a run, as a multiple of the fitted time: a longer one was held up by others."""


class EncodeCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of an encoder step; `token_pair_ns` applies to the squared token count of each image, summed over images."""

    step_ns: Nanoseconds = 0.0
    item_ns: Nanoseconds = 0.0
    token_ns: Nanoseconds = 0.0
    token_pair_ns: Nanoseconds = 0.0


class GenerateCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of a generator step: decodes and their total context, prompt tokens and their pairs.

    A pair is a prompt token and an earlier one, as in
    `vsched.policy.requests.pairs_of`.
    """

    step_ns: Nanoseconds = 0.0
    decode_ns: Nanoseconds = 0.0
    context_ns: Nanoseconds = 0.0
    prefill_ns: Nanoseconds = 0.0
    pair_ns: Nanoseconds = 0.0


class HostCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of the engine and the machine around the steps.

    Attributes:
        decision_ns: From a decision to the start of its step on idle ranks, and from its end to its
            result.
        gap_ns: Between two steps on ranks that already have the next decision.
        request_ns: Preparing a request without its images; likewise `token_ns` per prompt token.
        image_ns: Preparing an image on a thread; likewise `pixel_ns` per pixel.
        contention: Slowdown of all work while one, two, ... processes are busy on the cores of one
            machine: ranks, and the engine with its threads. Empty if processes do not slow each
            other down.
        cold: Slowdown of a step that starts on idle ranks, whose caches are cold.
        swap_byte_ns: Copying a byte of a KV block to host memory or back.
        depth: Maximum number of decisions in flight, if the model was fitted to another host; 0 for
            that of vsched.
    """

    decision_ns: Nanoseconds = 0.0
    gap_ns: Nanoseconds = 0.0
    request_ns: Nanoseconds = 0.0
    token_ns: Nanoseconds = 0.0
    image_ns: Nanoseconds = 0.0
    pixel_ns: Nanoseconds = 0.0
    contention: tuple[Annotated[float, Meta(ge=1)], ...] = ()
    cold: Annotated[float, Meta(ge=1)] = 1.0
    swap_byte_ns: Nanoseconds = 0.25
    depth: Annotated[int, Meta(ge=0)] = 0


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of a fitted model on its samples; 0.1 is 10 %."""

    samples: int
    median: float
    p95: float

    @staticmethod
    def of(errors: npt.NDArray[np.float64]) -> FitError:
        """Return the distribution of absolute relative errors."""
        median, p95 = np.percentile(errors, [50, 95])
        return FitError(samples=len(errors), median=float(median), p95=float(p95))


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Machine and time of a calibration.

    Attributes:
        others: Average number of cores kept busy by other programs; lower means more accurate
            figures.
    """

    measured: str
    processor: str
    cores: int
    others: float


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of one model on one machine, and the properties of both that a simulation needs.

    Attributes:
        source: Origin of the figures, for readers.
        pixels_per_token: Pixels per image token, after resizing.
        bytes_per_token: Encoder input bytes per image token: three per pixel for 8-bit pixels.
        noise: Relative standard deviation of step times; drawn for each step from the simulation's
            seed.
        shape: The model's shape; None if it must come from a checkpoint.
        kv_tokens: KV cache size of a replica if the configuration pins none; 0 if unknown.
        encode_error: None if the figures were not fitted; likewise `generate_error` and
            `prepare_error`.
        machine: None if the figures were not measured.
    """

    name: str
    source: str
    encode: EncodeCost
    generate: GenerateCost
    host: HostCost = HostCost()
    pixels_per_token: int = 784
    bytes_per_token: int = 2352
    noise: Annotated[float, Meta(ge=0, le=1)] = 0.0
    shape: ModelInfo | None = None
    kv_tokens: int = 0
    encode_error: FitError | None = None
    generate_error: FitError | None = None
    prepare_error: FitError | None = None
    machine: Machine | None = None

    def encode_ns(self, tokens: Sequence[int]) -> float:
        """Duration of an encoder step for images with these token counts."""
        return self.batch_ns(len(tokens), sum(tokens), sum(count * count for count in tokens))

    def batch_ns(self, items: int, tokens: int, pairs: int) -> float:
        """Duration of an encoder step; `pairs` is the sum of squared token counts of its images."""
        cost = self.encode
        return (
            cost.step_ns
            + cost.item_ns * items
            + cost.token_ns * tokens
            + cost.token_pair_ns * pairs
        )

    def generate_ns(
        self, *, decodes: int, context: int, prefill: int = 0, pairs: float = 0.0
    ) -> float:
        """Duration of a generator step; `context` is the total context length of all decodes."""
        cost = self.generate
        return (
            cost.step_ns
            + cost.decode_ns * decodes
            + cost.context_ns * context
            + cost.prefill_ns * prefill
            + cost.pair_ns * pairs
        )

    def swap_ns(self, size: int) -> float:
        """Duration of copying `size` bytes of KV blocks to host memory or back."""
        return self.host.swap_byte_ns * size

    def image_ns(self, tokens: int) -> float:
        """Time to decode and preprocess an image with this many tokens."""
        return self.host.image_ns + self.host.pixel_ns * tokens * self.pixels_per_token


class EncodeSample(msgspec.Struct, frozen=True, kw_only=True, tag="encode"):
    """A measured encoder step; `pairs` is the sum of squared token counts of its images."""

    items: int
    tokens: int
    pairs: int
    ns: float


class GenerateSample(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """A measured generator step."""

    decodes: int = 0
    context: int = 0
    prefill: int = 0
    pairs: float = 0.0
    ns: float


def fit(
    samples: Sequence[EncodeSample | GenerateSample],
    *,
    name: str,
    source: str,
    partial: bool = False,
    **more: Any,
) -> CostModel:
    """Fit a model to measured steps and record its errors.

    With `partial`, encoder steps may be missing, and cost nothing. `more` is passed to the model unchanged: host costs,
    shape, KV cache.

    Raises:
        ConfigError: When a stage has no samples.
    """
    encode = [one for one in samples if isinstance(one, EncodeSample)]
    generate = [one for one in samples if isinstance(one, GenerateSample)]
    if not generate or not (encode or partial):
        missing = "generator" if encode else "encoder"
        raise ConfigError(
            f"{name}: no measured {missing} steps to fit. Remedy: measure both stages"
        )
    found, encode_error = [0.0] * len(EncodeCost.__struct_fields__), None
    if encode:
        rows = [(1.0, one.items, one.tokens, one.pairs) for one in encode]
        found, encode_error = fit_linear(rows, [one.ns for one in encode])
    rows_of_steps = [(1.0, one.decodes, one.context, one.prefill, one.pairs) for one in generate]
    of_steps, generate_error = fit_linear(rows_of_steps, [one.ns for one in generate])
    return CostModel(
        name=name,
        source=source,
        encode=EncodeCost(**dict(zip(EncodeCost.__struct_fields__, found, strict=True))),
        generate=GenerateCost(**dict(zip(GenerateCost.__struct_fields__, of_steps, strict=True))),
        encode_error=encode_error,
        generate_error=generate_error,
        **more,
    )


def fit_linear(
    rows: Sequence[Sequence[float]], times: Sequence[float]
) -> tuple[list[float], FitError]:
    """Return the best non-negative coefficients, and their relative errors on all samples."""
    features, wanted = np.asarray(rows, dtype=float), np.asarray(times, dtype=float)
    relative = features / wanted[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0  # unused features have zero cost
    found = robust_fit(relative / scale, np.ones(len(wanted))) / scale
    return [float(one) for one in found], FitError.of(np.abs(relative @ found - 1))


def robust_fit(matrix: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return non-negative coefficients that fit most rows, with low weight for delayed outliers.

    Other work on the machine makes steps longer, never shorter, and some of them many times longer.
    The first rounds therefore fit a lower envelope; later rounds reduce the weight of a row with
    its distance, to zero beyond `FAR`.
    """
    found = non_negative(matrix, wanted)
    for _ in range(FIT_ROUNDS):
        weights = np.where(matrix @ found < wanted, LATE_WEIGHT, 1.0)
        found = non_negative(matrix * weights[:, None], wanted * weights)
    for _ in range(FIT_ROUNDS):
        weights = np.maximum(1 - ((matrix @ found - wanted) / FAR) ** 2, 0.0)
        if weights.any():
            found = non_negative(matrix * weights[:, None], wanted * weights)
    return found


def fit_totals(
    rows: Sequence[Sequence[float]], times: Sequence[float]
) -> tuple[list[float], FitError]:
    """Return non-negative coefficients with which all samples together take their measured time, and their errors.

    `fit_linear` finds the costs of undisturbed steps. In a run, steps are delayed again and again by the other threads
    and programs of the machine, and requests wait for the slow ones as well. With errors weighted by the inverse of
    the predicted time (a Poisson regression), the predictions have the same sum as the times.
    """
    features, wanted = np.asarray(rows, dtype=float), np.asarray(times, dtype=float)
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0  # unused features have zero cost
    matrix, expected = features / scale, np.full_like(wanted, wanted.mean())
    found, limited = np.zeros(len(scale)), wanted
    for _ in range(FIT_ROUNDS):
        weights = 1 / np.sqrt(expected)
        found = non_negative(matrix * weights[:, None], limited * weights)
        expected = np.maximum(matrix @ found, wanted.mean() * 1e-3)
        limited = np.minimum(wanted, HELD_UP * expected)
    return [float(one) for one in found / scale], FitError.of(np.abs(expected / wanted - 1))


def non_negative(
    matrix: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Solve non-negative least squares by trying every subset of non-zero coefficients.

    Five coefficients have 31 subsets, so an active-set method with its tolerances is not needed.
    """
    columns = np.flatnonzero(matrix.any(axis=0))
    best, best_error = np.zeros(matrix.shape[1]), float(wanted @ wanted)
    for size in range(1, len(columns) + 1):
        for chosen in itertools.combinations(columns, size):
            solved, *_ = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)
            if (solved < 0).any():
                continue
            rest = matrix[:, chosen] @ solved - wanted
            error = float(rest @ rest)
            if error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(matrix.shape[1]), error
                best[list(chosen)] = solved
    return best


def save_cost_model(model: CostModel, path: str | os.PathLike[str]) -> None:
    """Write a model as JSON."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")


def load_cost_model(name: str | os.PathLike[str]) -> CostModel:
    """Return a built-in model by name, or load one from a JSON file.

    Raises:
        ConfigError: When there is no such model or file, or the file is not a cost model.
    """
    if isinstance(name, str) and name in COST_MODELS:
        return COST_MODELS[name]
    path = Path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostModel)
    except OSError as error:
        known = ", ".join(COST_MODELS)
        raise ConfigError(
            f"--cost {name}: neither a built-in cost model ({known}) nor a file that can be read"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--cost {name}: not a cost model: {error}") from error


_TINY25 = CostModel(
    name="tiny25",
    source="rough, by hand from docs/benchmarks.md: 5.3 M parameters, 2 cores of an AMD EPYC, next to other programs",
    encode=EncodeCost(step_ns=3e6, item_ns=6e6, token_ns=220e3, token_pair_ns=128.0),
    generate=GenerateCost(
        step_ns=4e6, decode_ns=3e5, context_ns=150.0, prefill_ns=1.2e5, pair_ns=60.0
    ),
    host=HostCost(decision_ns=5e5, request_ns=2e6, image_ns=4e6, pixel_ns=30.0),
    shape=ModelInfo(
        family="qwen2_5_vl",
        path="",
        dtype="bfloat16",
        hidden_size=256,
        embedding_levels=1,
        vocab_size=4096,
        context_tokens=32768,
        kv_bytes_per_token=2048,
        item_tokens_max=16384,
        image_token_id=6,
        stop_token_ids=(2,),
    ),
    kv_tokens=65536,
)
_H100_7B = CostModel(
    name="h100-7b",
    source="rough, by arithmetic from public figures and not measured: Qwen2.5-VL-7B (15.2 GB of language model in "
    "bfloat16, 675 M parameters of vision tower) on an H100 SXM (3.35 TB/s, 989 TFLOP/s, of which 45 % is reached)",
    encode=EncodeCost(step_ns=3e6, item_ns=3e5, token_ns=18e3, token_pair_ns=1.6),
    generate=GenerateCost(
        step_ns=6.5e6, decode_ns=3e4, context_ns=23.0, prefill_ns=3.4e4, pair_ns=1.3
    ),
    host=HostCost(decision_ns=3e5, request_ns=1e6, image_ns=3e6, pixel_ns=25.0),
    shape=ModelInfo(
        family="qwen2_5_vl",
        path="",
        dtype="bfloat16",
        hidden_size=3584,
        embedding_levels=1,
        vocab_size=152064,
        context_tokens=128000,
        kv_bytes_per_token=57344,
        item_tokens_max=16384,
        image_token_id=151655,
        stop_token_ids=(151645,),
    ),
    kv_tokens=800_000,
)
COST_MODELS = {model.name: model for model in (_H100_7B, _TINY25)}
"""Built-in models. Both are rough: calibrate one before relying on absolute times."""
