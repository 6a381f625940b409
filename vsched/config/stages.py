"""Configuration keys of the two stages: encode and generate."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vsched.config.section import PolicyTable, Section, Size


class StageConfig(Section, frozen=True, kw_only=True):
    """Keys of both stages: their processes, and the machine resources of these."""

    replicas: Annotated[
        int,
        Meta(
            ge=1, le=64, description="Replicas of the stage, each with its own copy of the model."
        ),
    ] = 1
    tensor_parallel: Annotated[
        int,
        Meta(ge=1, le=64, description="Ranks that share the model of a replica (tensor parallel)."),
    ] = 1
    plugin: Annotated[str, Meta(description="Worker plug-in that runs the model.")] = "transformers"
    weights: Annotated[
        Literal["auto", "int8", "int4"],
        Meta(
            description="What weights are made into on loading: `int8` or `int4`, with a scale for each group of "
            "inputs, on a CPU. Head and embedding are int8 then. `auto` leaves them as the checkpoint has them."
        ),
    ] = "auto"
    weights_group: Annotated[
        int,
        Meta(
            ge=0,
            le=128,
            multiple_of=16,
            description="Inputs of an output that have one scale then; 0 for 128 of int8 and 32 of int4.",
        ),
    ] = 0
    calibration: Annotated[
        str,
        Meta(
            description="File of `vsched calibrate`, by which the scales of int8 or int4 are chosen; empty for none."
        ),
    ] = ""
    activations: Annotated[
        Literal["auto", "float", "int8"],
        Meta(
            description="What rows are multiplied as by weights of int8 or int4: `float`, or `int8`, into which they "
            "are made block by block, on a CPU. `auto` is `int8` in bfloat16 where the processor has instructions for "
            "that, else `float`. With AMX, `auto` and `float` leave more than 16 rows as they are, and multiply them "
            "by weights that become bfloat16."
        ),
    ] = "auto"
    device: Annotated[
        str,
        Meta(
            description="Device of the stage; from `cuda:N` on, every rank of every replica takes the next."
        ),
    ] = "cpu"
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Threads that a rank computes with, always. By default the cores of the machine, shared out "
            "among the processes of all ranks, at least 1; a rank then uses fewer while other programs keep the cores "
            "busy."
        ),
    ] = None
    memory_limit: Annotated[
        Size,
        Meta(
            description="Hard limit on the private memory of a rank, as in `4GiB`; 0 for none. `auto` is none but on "
            "`cpu`: there it is an eighth of what the host has available at start, or 2 GiB where that is more; at "
            "most a quarter, and at most the share of one rank where that of one more is left over."
        ),
    ] = "auto"

    @property
    def on_cpu(self) -> bool:
        """True if the ranks compute on the host's processor, in the host's memory."""
        return self.device == "cpu"

    @property
    def quantization(self) -> dict[str, Any]:
        """The quantization fields of `WorkerSettings`."""
        return {
            "weights": self.weights,
            "weights_group": self.weights_group,
            "calibration": self.calibration,
            "activations": self.activations,
        }


class EncodeConfig(StageConfig, frozen=True, kw_only=True):
    """The encode stage: images to embeddings."""

    replicas: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Replicas of the stage, each with its own copy of the model; 0 to serve text alone, as a "
            "checkpoint without a vision part always is.",
        ),
    ] = 1
    reserved: Annotated[
        Size,
        Meta(
            description="Memory that the largest batch of images takes, as in `4GiB`; "
            "empty to run one at start and measure."
        ),
    ] = ""
    admission: Annotated[
        PolicyTable,
        Meta(
            description="Which items join an encoder step. `max_tokens` is also the most tokens that one image "
            "may have; by default it is `generate.max_batch_tokens`, and 0 switches both limits off. `max_items` is "
            "by default 8, but 1 on a CPU, where a batch takes as long as its images one by one."
        ),
    ] = msgspec.field(default_factory=partial(dict, use="token-budget"))
    encoding: Annotated[
        PolicyTable, Meta(description="Which items of a request are encoded now.")
    ] = msgspec.field(default_factory=partial(dict, use="chunk-aware"))
    dispatch: Annotated[
        PolicyTable, Meta(description="Which replica has the next images, and which they can be.")
    ] = msgspec.field(default_factory=partial(dict, use="fewest-held-up"))
    eviction: Annotated[PolicyTable, Meta(description="Which cached embeddings are evicted.")] = (
        msgspec.field(default_factory=partial(dict, use="lru"))
    )
    reclaim: Annotated[
        PolicyTable,
        Meta(description="Whose ready embedding gives way to an image of an older request."),
    ] = msgspec.field(default_factory=partial(dict, use="youngest"))


class GenerateConfig(StageConfig, frozen=True, kw_only=True):
    """The generate stage: prefill and decode."""

    attention: Annotated[
        str,
        Meta(
            description="Attention implementation; `auto` is the fastest that the machine has, `exact` "
            "keeps transformers' own modules, on a CPU in bfloat16 too."
        ),
    ] = "auto"
    block_size: Annotated[int, Meta(ge=1, le=256, description="Tokens of a KV block.")] = 16
    max_batch_tokens: Annotated[
        int, Meta(ge=2, description="Most tokens of a step, prefill and decode together.")
    ] = 2048
    chunk_tokens: Annotated[
        int, Meta(ge=1, description="Most prompt tokens of one request in a step.")
    ] = 512
    step_target_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="Target for the time of a step: while requests decode, prefill is cut to it, and so is "
            "encoding in the same processes; 0 for no limit.",
        ),
    ] = 100.0
    step_target_ratio: Annotated[
        float,
        Meta(
            ge=1.5,
            description="A step with prefill may always take this many times as long as one without; "
            "it matters where a heavy model's decodes alone come near `step_target_ms`.",
        ),
    ] = 8.0
    slots: Annotated[int, Meta(ge=1, description="Most requests that run at a time.")] = 64
    max_waiting: Annotated[
        int, Meta(ge=1, description="Most requests that wait; further ones get a 429.")
    ] = 1024
    max_waiting_bytes: Annotated[
        int,
        Meta(ge=1, description="Most bytes held by waiting requests; further ones get a 429."),
    ] = 1 << 30
    context_tokens: Annotated[
        int, Meta(ge=0, description="Longest prompt and output together; 0 for the checkpoint's.")
    ] = 0
    hooks_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Interval of a worker's hooks, such as rebalancing experts; by default the worker's own, "
            "and 0 only on request of a rank."
        ),
    ] = None
    kv_pages: Annotated[
        Literal["on_use", "at_start"],
        Meta(
            description="When the host gives the pages of the KV cache on a CPU: as blocks are used, where the limit "
            "on the process counts what is reserved and the host tells what it has free, or all of them at start; "
            "see docs/memory.md."
        ),
    ] = "on_use"
    kv_dtype: Annotated[
        Literal["auto", "int8"],
        Meta(
            description="What the KV cache keeps keys and values in: `int8`, with a scale for each head of a token, "
            "on a CPU, about half of the memory of bfloat16; see docs/memory.md. `auto` is the type of the model."
        ),
    ] = "auto"
    prefix_cache: Annotated[
        bool,
        Meta(description="Whether KV blocks of finished requests are kept for later prompts."),
    ] = True
    swap_memory: Annotated[
        Size,
        Meta(
            description="Host memory of each rank for KV blocks of preempted requests, as in `4GiB`, where "
            "`generate.preemption` swaps them; 0 for none. It is beside `generate.memory_limit`. See docs/swapping.md."
        ),
    ] = 0
    state_snapshots: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="How many states are kept for later prompts, of a model whose layers keep a state beside KV "
            "blocks; by default as many as `slots`. 0: it has no prefix cache."
        ),
    ] = None
    draft_model: Annotated[
        str,
        Meta(
            description="Folder of a smaller checkpoint of the same vocabulary that drafts, where `generate.drafting` "
            "says so; empty for none. See docs/speculative-decoding.md."
        ),
    ] = ""
    admission: Annotated[
        PolicyTable, Meta(description="Which waiting requests join the next step.")
    ] = msgspec.field(default_factory=partial(dict, use="fifo"))
    memory: Annotated[PolicyTable, Meta(description="How large the KV cache is.")] = msgspec.field(
        default_factory=partial(dict, use="auto-profile")
    )
    preemption: Annotated[
        PolicyTable,
        Meta(
            description="Which request is preempted when KV blocks run out, and whether it is recomputed "
            "or swapped to host memory."
        ),
    ] = msgspec.field(default_factory=partial(dict, use="youngest"))
    eviction: Annotated[
        PolicyTable, Meta(description="Which cached prefix blocks are evicted.")
    ] = msgspec.field(default_factory=partial(dict, use="lru"))
    insertion: Annotated[
        PolicyTable,
        Meta(description="What of a request that ended the prefix cache keeps."),
    ] = msgspec.field(default_factory=partial(dict, use="everything"))
    drafting: Annotated[
        PolicyTable,
        Meta(
            description="How many tokens a step may draft for a request beyond one; see docs/speculative-decoding.md."
        ),
    ] = msgspec.field(default_factory=partial(dict, use="forced-tokens"))
    step: Annotated[
        PolicyTable,
        Meta(description="Which prefilling requests advance in a step, and by how many tokens."),
    ] = msgspec.field(default_factory=partial(dict, use="in-order"))
