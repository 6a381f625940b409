"""What a step costs: linear models of encoder and generator steps, fitted to measured ones.

A step's time is a sum of parts, each proportional to something that a decision says: so the model is fitted by linear
least squares, on relative errors (a step of 2 ms counts as much as one of 2 s), with coefficients that are not negative
(no work makes a step shorter), and with less and less regard for steps that something else has delayed.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from vsched.errors import ConfigError
from vsched.types import ModelInfo

Nanoseconds = Annotated[float, Meta(ge=0)]
FIT_ROUNDS = 10
LATE_WEIGHT = 0.3
"""What counts at first whoever takes longer than the model says."""
FAR = 0.4
"""A relative error with which a row counts no more."""


class EncodeCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An encoder step; `token_pair_ns` counts the tokens of an image squared, summed over its images."""

    step_ns: Nanoseconds = 0.0
    item_ns: Nanoseconds = 0.0
    token_ns: Nanoseconds = 0.0
    token_pair_ns: Nanoseconds = 0.0


class GenerateCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A generator step: requests that decode and their contexts together, prompt tokens and their pairs.

    A pair is a prompt token and one before it, as in `vsched.kernel.generate.step_budget.pairs_of`.
    """

    step_ns: Nanoseconds = 0.0
    decode_ns: Nanoseconds = 0.0
    context_ns: Nanoseconds = 0.0
    prefill_ns: Nanoseconds = 0.0
    pair_ns: Nanoseconds = 0.0


class HostCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine and the machine add.

    Attributes:
        decision_ns: From a decision to the start of its step on ranks that are idle, and from its end to its result.
        gap_ns: Between two steps of ranks that have the next decision already.
        request_ns: Preparing a request, beside its images; likewise `token_ns` for each token of its prompt.
        image_ns: Preparing an image on a thread; likewise `pixel_ns` for each pixel of it.
        contention: Where processes share the cores of one machine: how many times as long all work takes while one, two
            and more of them are at work: those of ranks, and the engine's with its threads. Empty where they do not
            slow each other down.
        cold: How many times as long a step takes that begins on ranks which had nothing to do: their caches are cold.
        swap_byte_ns: Copying a byte of a KV block to host memory, or back.
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


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """How far a fitted model is from its samples: relative errors, 0.1 for 10 %."""

    samples: int
    median: float
    p95: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model was measured, and when.

    Attributes:
        others: Cores that other programs kept busy meanwhile, on average: the less, the better the figures.
        settings: What of the configuration the figures depend on, as plain values.
    """

    measured: str
    processor: str
    cores: int
    others: float
    versions: dict[str, str]
    settings: dict[str, Any]


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The costs of one model on one machine, and what else a simulation must know of the two.

    Attributes:
        source: Where the figures are from, for readers.
        pixels_per_token: Pixels of an image, once resized, for each of its tokens.
        bytes_per_token: Bytes of what its encoder reads, for each of its tokens: three a pixel where pixels are bytes.
        noise: Relative standard deviation of a step's time; drawn anew for each step from the simulation's seed.
        shape: The model's shape; None where a checkpoint has to say.
        kv_tokens: KV cache of a replica where the configuration pins none; 0 for unknown.
        encode_error: None for figures that were not fitted; likewise `generate_error` and `prepare_error`.
        machine: None for figures that were not measured.
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
        """Return the time of an encoder step with images of these numbers of tokens."""
        cost = self.encode
        pairs = sum(count * count for count in tokens)
        return (
            cost.step_ns
            + cost.item_ns * len(tokens)
            + cost.token_ns * sum(tokens)
            + cost.token_pair_ns * pairs
        )

    def generate_ns(
        self, *, decodes: int, context: int, prefill: int = 0, pairs: float = 0.0
    ) -> float:
        """Return the time of a generator step; `context` is the tokens that all decodes see together."""
        cost = self.generate
        return (
            cost.step_ns
            + cost.decode_ns * decodes
            + cost.context_ns * context
            + cost.prefill_ns * prefill
            + cost.pair_ns * pairs
        )

    def swap_ns(self, size: int) -> float:
        """Return the time of copying so many bytes of KV blocks to host memory, or back."""
        return self.host.swap_byte_ns * size

    def image_ns(self, tokens: int) -> float:
        """Return the time to decode and process an image of this number of tokens."""
        return self.host.image_ns + self.host.pixel_ns * tokens * self.pixels_per_token


class EncodeSample(msgspec.Struct, frozen=True, kw_only=True, tag="encode"):
    """A measured encoder step; `pairs` is the sum of squares of its images' tokens."""

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
    samples: Sequence[EncodeSample | GenerateSample], *, name: str, source: str, **more: Any
) -> CostModel:
    """Return the model that fits measured steps best, with how far it is from them.

    `more` goes to the model as it is: host costs, the shape, the KV cache.

    Raises:
        ConfigError: When there are no samples of one of the two stages, or one of them cannot have been measured.
    """
    _check(samples)
    encode = [one for one in samples if isinstance(one, EncodeSample)]
    generate = [one for one in samples if isinstance(one, GenerateSample)]
    if not encode or not generate:
        missing = "generator" if encode else "encoder"
        raise ConfigError(
            f"{name}: no measured {missing} steps to fit. Remedy: measure both stages"
        )
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


def _check(samples: Sequence[EncodeSample | GenerateSample]) -> None:
    for sample in samples:
        sizes = msgspec.structs.asdict(sample)
        took_ns = sizes.pop("ns")
        if not (0 < took_ns < math.inf and all(0 <= size < math.inf for size in sizes.values())):
            raise ConfigError(
                f"{sample}: not a step that can be fitted. Remedy: leave out steps whose time was not measured"
            )


def fit_linear(
    rows: Sequence[Sequence[float]], times: Sequence[float]
) -> tuple[list[float], FitError]:
    """Return coefficients that are not negative and fit best, and their relative errors on all that is given."""
    features, wanted = np.asarray(rows, dtype=float), np.asarray(times, dtype=float)
    relative = features / wanted[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0  # what never occurs costs nothing
    found = robust_fit(relative / scale, np.ones(len(wanted))) / scale
    errors = np.abs(relative @ found - 1)
    median, p95 = np.percentile(errors, [50, 95])
    error = FitError(samples=len(wanted), median=float(median), p95=float(p95))
    return [float(one) for one in found], error


def robust_fit(matrix: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return coefficients of at least 0 that most rows agree on; those that something has delayed come out too low.

    Whatever else a machine does makes steps longer, never shorter, and some of them many times. So the first rounds
    look for what few rows exceed; from there on, a row counts the less the farther off it is, and not at all beyond
    `FAR`.
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


def non_negative(
    matrix: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return the coefficients of at least 0 that solve least squares best, by trying which of them are 0.

    Five coefficients have 31 subsets, so there is no need for an active-set method and its tolerances.
    """
    columns = range(matrix.shape[1])
    best, best_error = np.zeros(len(columns)), float(wanted @ wanted)
    for size in range(1, len(columns) + 1):
        for chosen in itertools.combinations(columns, size):
            solved, *_ = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)
            if (solved < 0).any():
                continue
            rest = matrix[:, chosen] @ solved - wanted
            error = float(rest @ rest)
            if error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(len(columns)), error
                best[list(chosen)] = solved
    return best


def save_cost_model(model: CostModel, path: str | os.PathLike[str]) -> None:
    """Write a model as JSON."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")


def load_cost_model(name: str | os.PathLike[str]) -> CostModel:
    """Return a built-in model by its name, or the one in a JSON file.

    Raises:
        ConfigError: When there is neither, or the file is not a cost model.
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
    source="rough, by hand from docs/benchmarks.md: 5.3 M parameters, 2 cores of an AMD EPYC, other work beside it",
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
"""The built-in models; both are rough: calibrate one before you trust absolute times."""
