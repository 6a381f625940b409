"""Configuration keys of the two stages: encode and generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from vsched.config.section import PolicyTable, Section, Size, with_policy_tables

AUTO = "auto"
CPU = "cpu"


class StageConfig(Section, frozen=True, kw_only=True):
    """Keys of both stages: their processes, and the machine resources of these."""

    replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of replicas of the stage, each with its own copy of the model.",
        ),
    ] = 1
    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of ranks that share the model of a replica (tensor parallelism).",
        ),
    ] = 1
    plugin: Annotated[str, Meta(description="Worker plug-in that runs the model.")] = "transformers"
    weights: Annotated[
        Literal["auto", "int8", "int4"],
        Meta(
            description="Weight quantization while loading, on a CPU: `int8` or `int4`, with a scale for each group "
            "of inputs; the LM head and the embedding are int8 in both cases. `auto` keeps the "
            "checkpoint's weights."
        ),
    ] = "auto"
    weights_group: Annotated[
        int,
        Meta(
            ge=0,
            le=128,
            multiple_of=16,
            description="Group size of weight quantization: the inputs of an output that share a scale; 0 for 128 "
            "with int8 and 32 with int4.",
        ),
    ] = 0
    calibration: Annotated[
        str,
        Meta(
            description="Calibration file from `vsched calibrate`, for the scales of int8 or int4 weights; empty for "
            "none."
        ),
    ] = ""
    activations: Annotated[
        Literal["auto", "float", "int8"],
        Meta(
            description="Activation type in products with int8 or int4 weights, on a CPU: `float`, or `int8`, with "
            "dynamic quantization in blocks. `auto` is `int8` in bfloat16 if the processor has "
            "instructions for it, otherwise `float`. With AMX, `auto` and `float` keep the activations of "
            "more than 16 tokens in floating point and dequantize the weights to bfloat16."
        ),
    ] = "auto"
    device: Annotated[
        str,
        Meta(
            description="Device of the stage; with `cuda:N`, the ranks of all replicas take consecutive devices from "
            "N on. `auto` is CUDA if the host has a usable device, otherwise `cpu`; `vsched check` reports the choice. "
            "See docs/gpu.md."
        ),
    ] = AUTO
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Fixed number of compute threads per rank. By default the cores of the machine are divided "
            "among the processes of all ranks, at least 1 each, and a rank uses fewer threads while other "
            "programs keep the cores busy."
        ),
    ] = None
    memory_limit: Annotated[
        Size,
        Meta(
            description="Hard limit on the private memory of a rank, such as `4GiB`; 0 for none. `auto` is none "
            "except on `cpu`: there it is the larger of 2 GiB and an eighth of the host's available "
            "memory at start, but at most a quarter, and at most 1 / (ranks + 1), of that memory."
        ),
    ] = "auto"

    @property
    def on_cpu(self) -> bool:
        """True if the ranks compute on the host's processor, in the host's memory."""
        return self.device == CPU

    @property
    def on_cuda(self) -> bool:
        """True if the ranks compute on CUDA devices."""
        return self.device.startswith("cuda")

    @property
    def quantization(self) -> dict[str, Any]:
        """The quantization fields of `WorkerSettings`."""
        return {
            "weights": self.weights,
            "weights_group": self.weights_group,
            "calibration": self.calibration,
            "activations": self.activations,
        }


@with_policy_tables("encode")
class EncodeConfig(StageConfig, frozen=True, kw_only=True):
    """The encode stage: images to embeddings."""

    replicas: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Number of replicas of the stage, each with its own copy of the model; 0 to serve only text, "
            "like a checkpoint without a vision part.",
        ),
    ] = 1
    reserved: Annotated[
        Size,
        Meta(
            description="Memory for the largest batch of images, such as `4GiB`; empty to measure it at start by "
            "running one."
        ),
    ] = ""
    if TYPE_CHECKING:  # as `with_policy_tables` adds it
        admission: PolicyTable = {}
        encoding: PolicyTable = {}
        dispatch: PolicyTable = {}
        reclaim: PolicyTable = {}
        eviction: PolicyTable = {}


@with_policy_tables("generate")
class GenerateConfig(StageConfig, frozen=True, kw_only=True):
    """The generate stage: prefill and decode."""

    attention: Annotated[
        str,
        Meta(
            description="Attention implementation; `auto` is the fastest on the machine, `exact` uses the modules of "
            "transformers even on a CPU in bfloat16."
        ),
    ] = "auto"
    block_size: Annotated[
        int, Meta(ge=1, le=256, description="Number of tokens in a KV block.")
    ] = 16
    max_batch_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum number of tokens in a step, prefill and decode together; 0 for 2048 on a CPU, 8192 "
            "with CUDA.",
        ),
    ] = 0
    chunk_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum number of prompt tokens of one request in a step; 0 for 512 on a CPU, 8192 with "
            "CUDA, but at most `max_batch_tokens`.",
        ),
    ] = 0
    step_target_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="Target for the time of a step: while requests decode, prefill is limited to it, and so is "
            "encoding in the same processes; 0 for no limit.",
        ),
    ] = 100.0
    step_target_ratio: Annotated[
        float,
        Meta(
            ge=1.5,
            description="A step with prefill may always take this many times as long as one without, in case the "
            "decodes of a large model alone come close to `step_target_ms`.",
        ),
    ] = 8.0
    slots: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum number of running requests; 0 for 64 on a CPU, 256 with CUDA.",
        ),
    ] = 0
    max_waiting: Annotated[
        int, Meta(ge=1, description="Maximum number of waiting requests; further ones get a 429.")
    ] = 1024
    max_waiting_bytes: Annotated[
        int,
        Meta(ge=1, description="Maximum memory held by waiting requests; further ones get a 429."),
    ] = 1 << 30
    context_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum length of prompt and output together; 0 for the checkpoint's.",
        ),
    ] = 0
    kv_pages: Annotated[
        Literal["on_use", "at_start"],
        Meta(
            description="Time at which the host allocates the pages of the KV cache on a CPU: on first use, if the "
            "process's limit counts reserved memory and the host reports its free memory, or all at "
            "start; see docs/memory.md."
        ),
    ] = "on_use"
    kv_dtype: Annotated[
        Literal["auto", "int8"],
        Meta(
            description="Data type of the KV cache: `int8`, on a CPU, with one scale for each head of a token, takes "
            "about half of the memory of bfloat16; see docs/memory.md. `auto` is the type of the model."
        ),
    ] = "auto"
    prefix_cache: Annotated[
        bool,
        Meta(description="Keep the KV blocks of finished requests for later prompts."),
    ] = True
    swap_memory: Annotated[
        Size,
        Meta(
            description="Host memory of each rank for KV blocks of preempted requests, such as `4GiB`, if "
            "`generate.preemption` swaps them; 0 for none. It is not part of `generate.memory_limit`. See "
            "docs/swapping.md."
        ),
    ] = 0
    state_snapshots: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Number of recurrent state snapshots kept for later prompts, in models with recurrent layers; "
            "by default the number of `slots`, at most 64. 0 disables their prefix cache."
        ),
    ] = None
    draft_model: Annotated[
        str,
        Meta(
            description="Folder of a draft model, a smaller checkpoint with the same vocabulary, for "
            "`generate.drafting`; empty for none. See docs/speculative-decoding.md."
        ),
    ] = ""
    if TYPE_CHECKING:
        admission: PolicyTable = {}
        step: PolicyTable = {}
        preemption: PolicyTable = {}
        eviction: PolicyTable = {}
        insertion: PolicyTable = {}
        memory: PolicyTable = {}
        drafting: PolicyTable = {}
