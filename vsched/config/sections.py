"""All configuration keys with their types, bounds, defaults and descriptions.

The descriptions appear in the JSON Schema and in `docs/config.md`. Sections are frozen: nothing is reloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from vsched.config.adapters import AdaptersConfig
from vsched.config.byte_sizes import size_bytes
from vsched.config.cluster import OWN_HOST, RAY_HOST, ClusterConfig
from vsched.config.section import PolicyTable, Section, with_policy_tables
from vsched.config.stages import EncodeConfig, GenerateConfig
from vsched.worker.shares import default_threads, usable_cores


class ModelConfig(Section, frozen=True, kw_only=True):
    """The checkpoint."""

    path: Annotated[
        str,
        Meta(
            description="Checkpoint: a folder, `ORG/NAME[@REVISION]` of the Hugging Face hub, or a GGUF file."
        ),
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="Data type of weights, KV cache and embeddings; `auto` is the checkpoint's, but with CUDA "
            "bfloat16 instead of float32, and float16 on devices without bfloat16."
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        Meta(
            description="Make the logits of a request bitwise equal in any batch, with any chunking of its prompt, "
            "and after preemption or a restart. Only on a CPU in bfloat16; see docs/determinism.md."
        ),
    ] = False
    chat_template: Annotated[
        str,
        Meta(
            description="Chat template: a file, or the name of a template in the checkpoint; empty for its default."
        ),
    ] = ""
    tool_format: Annotated[
        Literal[
            "auto",
            "hermes",
            "deepseek",
            "deepseek-v3.1",
            "mistral",
            "mistral-list",
            "llama-json",
            "pythonic",
            "qwen3-coder",
            "glm",
            "minimax",
            "gemma4",
            "harmony",
        ],
        Meta(
            description="Tool-call format of the model; `auto` derives it from the chat template."
        ),
    ] = "auto"
    reasoning_format: Annotated[
        Literal["auto", "none", "think", "mistral", "gemma4", "harmony"],
        Meta(
            description="Reasoning markers of the model: `<think>` and `</think>` for `think`, `[THINK]` and "
            "`[/THINK]` for `mistral`, channels for `gemma4` and `harmony`; `none` leaves reasoning in "
            "the content; `auto` derives it from the chat template."
        ),
    ] = "auto"
    sampling_defaults: Annotated[
        bool,
        Meta(
            description="Use the checkpoint's `generation_config.json` for `temperature`, `top_p`, `top_k`, `min_p` "
            "and `repetition_penalty` if a request does not set them; otherwise they are 1 or disabled."
        ),
    ] = True
    name: Annotated[
        str,
        Meta(description="Model name for clients; empty for the last component of `model.path`."),
    ] = ""

    @property
    def served_name(self) -> str:
        """The name that clients use."""
        return self.name or Path(self.path).name


class ServerConfig(Section, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to listen on; 0 lets the system choose.")
    ] = 8000
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of processes that serve HTTP: 1 means the engine's own process, more are separate API "
            "processes.",
        ),
    ] = 1
    api_key_variable: Annotated[
        str,
        Meta(description="Environment variable with the API key; empty for no key."),
    ] = ""
    admin_key_variable: Annotated[
        str,
        Meta(
            description="Environment variable with the key for `/admin/`; empty to open it to local programs only, "
            "with the API key."
        ),
    ] = ""
    tenant_keys_variable: Annotated[
        str,
        Meta(
            description="Environment variable with API keys of tenants, one `tenant=key` per line; empty for none."
        ),
    ] = ""
    tenant_header: Annotated[
        str,
        Meta(description="Header with the tenant of a request, set by a gateway; empty for none."),
    ] = ""
    tenants_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Number of tenants with their own metrics; the others are counted together.",
        ),
    ] = 64
    metrics_without_key: Annotated[bool, Meta(description="Serve `/metrics` without a key.")] = (
        False
    )
    vllm_metrics: Annotated[
        bool,
        Meta(
            description="Also serve metrics under vLLM's names, such as `vllm:num_requests_running`."
        ),
    ] = False
    access_log: Annotated[
        bool,
        Meta(
            description="Log method, path, status, duration and id of each request, except successful probes. "
            "Queries and contents are never logged."
        ),
    ] = False
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="Base URL of an OpenTelemetry collector that receives the traces of requests, such as "
            "`http://127.0.0.1:4318` (OTLP over HTTP); empty to take it from `OTEL_EXPORTER_OTLP_ENDPOINT`. "
            "Needs `pip install 'vsched[otel]'`."
        ),
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Names of the server that are accepted in `Host`, in addition to its addresses and "
            "`localhost`: `api.example.com`, `*.example.com`, or `*` for any. By default none on a "
            "loopback address, otherwise any."
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins of web pages that may call the server, such as `https://app.example.com`; `*` for "
            "any."
        ),
    ] = ()
    body_bytes_max: Annotated[int, Meta(ge=1024, description="Maximum size of a request body.")] = (
        32 << 20
    )
    bodies_bytes_max: Annotated[
        int,
        Meta(
            ge=1024,
            description="Maximum total size of request bodies above 64 KiB that are being read or prepared; further "
            "ones wait for half of `server.receive_s`, then get a 503.",
        ),
    ] = 256 << 20
    logprobs_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum number of alternatives per token that a request may ask for (`top_logprobs`). The "
            "whole vocabulary (-1) counts with its size.",
        ),
    ] = 20
    prompt_logprobs_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 22,
            description="Maximum number of prompt log-probabilities in a request: prompt tokens times (1 + "
            "alternatives per token). Each takes about 70 bytes of the response.",
        ),
    ] = 1 << 18
    choices_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum number of choices in a request: its prompts times `n`, or times `best_of`.",
        ),
    ] = 128
    strict_fields: Annotated[
        bool,
        Meta(
            description="Refuse unknown fields within messages, content parts and other nested objects. At the top "
            "level of a request, they are always refused."
        ),
    ] = False
    usage_always: Annotated[
        bool,
        Meta(
            description="Include the usage so far in every stream event, even if not requested, for gateways that "
            "count it."
        ),
    ] = False
    root_path: Annotated[
        str,
        Meta(
            description="Path prefix that a proxy does not remove, such as `/llm`; paths without it are served, too. "
            "Empty for none."
        ),
    ] = ""
    headers_max: Annotated[
        int, Meta(ge=1, description="Maximum number of headers in a request.")
    ] = 100
    header_bytes_max: Annotated[
        int, Meta(ge=1024, description="Maximum total size of a request's URL and headers.")
    ] = 32 << 10
    max_connections: Annotated[
        int, Meta(ge=1, description="Maximum number of open connections.")
    ] = 1024
    receive_s: Annotated[
        float, Meta(gt=0, description="Maximum time for a request, headers and body, to arrive.")
    ] = 60.0
    send_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Maximum time that a client may leave a full connection unread; after it, its request is "
            "aborted.",
        ),
    ] = 60.0


@with_policy_tables("media")
class MediaConfig(Section, frozen=True, kw_only=True):
    """Images and videos: allowed sources and sizes."""

    image_bytes_max: Annotated[int, Meta(ge=1, description="Maximum size of an encoded image.")] = (
        20 << 20
    )
    image_pixels_max: Annotated[
        int, Meta(ge=1, description="Maximum number of pixels of an image, read from its header.")
    ] = 64_000_000
    webp_pixels_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum number of pixels of a WEBP image, whose decoder blocks the server.",
        ),
    ] = 16_000_000
    images_max: Annotated[
        int, Meta(ge=0, description="Maximum number of images per request; 0 refuses all images.")
    ] = 64
    videos_max: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum number of videos per request, each of which counts as an image, too; 0 refuses all "
            "videos.",
        ),
    ] = 4
    video_bytes_max: Annotated[int, Meta(ge=1, description="Maximum size of a video file.")] = (
        64 << 20
    )
    video_frames_max: Annotated[
        int, Meta(ge=1, description="Maximum number of frames that are sampled from a video.")
    ] = 768
    video_seconds_max: Annotated[float, Meta(gt=0, description="Maximum duration of a video.")] = (
        3600.0
    )
    video_decode_s: Annotated[
        float, Meta(gt=0, description="Maximum CPU time for decoding a video.")
    ] = 20.0
    request_bytes_max: Annotated[
        int,
        Meta(ge=1, description="Maximum total size of the encoded images and videos of a request."),
    ] = 64 << 20
    directory: Annotated[
        str, Meta(description="Folder of the files that `file:` URLs may name; empty for none.")
    ] = ""
    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts from which images may be fetched, as `host:port`, or as `host` for ports 80 (http) and "
            "443 (https)."
        ),
    ] = ()
    private_hosts: Annotated[
        tuple[str, ...],
        Meta(description="Hosts in `hosts` that may resolve to private or loopback addresses."),
    ] = ()
    allow_embeddings: Annotated[
        bool,
        Meta(description="Accept embeddings in requests (`image_embeds`, `video_embeds`)."),
    ] = False
    fetch_s: Annotated[float, Meta(gt=0, description="Maximum time to fetch one image.")] = 10.0
    prepare_s: Annotated[
        float, Meta(gt=0, description="Maximum time to prepare a request, including waits.")
    ] = 30.0
    preparing_max: Annotated[
        int,
        Meta(
            ge=1, description="Maximum number of requests in preparation; further ones get a 429."
        ),
    ] = 512
    preparing_bytes_max: Annotated[
        int, Meta(ge=1, description="Maximum encoded bytes held by requests in preparation.")
    ] = 512 << 20
    decode_bytes: Annotated[
        int, Meta(ge=1, description="Memory for decoding and preprocessing; images wait for it.")
    ] = 1 << 30
    threads: Annotated[
        int, Meta(ge=1, description="Number of threads for decoding and preprocessing.")
    ] = 2
    plans_max: Annotated[
        int, Meta(ge=1, description="Number of images whose plan is remembered.")
    ] = 8192
    if TYPE_CHECKING:
        pruning: PolicyTable = {}


class ArenaConfig(Section, frozen=True, kw_only=True):
    """The shared memory between the engine and its ranks."""

    pixel_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory for preprocessed images: waiting for the encoder, or cached, because each turn of a "
            "conversation contains all its images; 0 for 1 GiB on a CPU, 4 GiB with CUDA.",
        ),
    ] = 0
    embedding_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory for embeddings, in use and cached; 0 for 256 MiB on a CPU, 1 GiB with CUDA.",
        ),
    ] = 0


class PoliciesConfig(Section, frozen=True, kw_only=True):
    """Time limits of policy calls."""

    call_budget_ms: Annotated[
        float,
        Meta(ge=0, description="Maximum time of a policy call; 0 for no limit."),
    ] = 50.0
    slow_calls_max: Annotated[
        int,
        Meta(
            ge=0,
            le=99,
            description="Number of calls over `call_budget_ms`, in the last 100 calls of a policy, after which the "
            "default replaces it until the server is restarted.",
        ),
    ] = 10
    passed_over_max_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="Longest time for which policies may hold a request in one place, or let younger ones pass it; "
            "then it goes first.",
        ),
    ] = 60.0


class VllmConfig(Section, frozen=True, kw_only=True):
    """The bridge to vLLM; without effect in vsched's server and in simulations. See docs/policies-in-vllm.md."""

    trace: Annotated[
        str,
        Meta(
            description="File for the arrivals of a run inside vLLM, for `vsched simulate --trace`; its times are in a "
            "file of the same name with `.run`. Empty for none."
        ),
    ] = ""
    statistics: Annotated[
        bool,
        Meta(
            description="Write figures once per second, which `GET /vsched` of `FrontDoor` returns."
        ),
    ] = False


class RecordConfig(Section, frozen=True, kw_only=True):
    """The record of the scheduler's events and decisions, for `vsched replay`."""

    path: Annotated[str, Meta(description="File for the record; empty for no record.")] = ""
    segment_bytes: Annotated[
        int, Meta(ge=4096, description="Size at which a new segment is started.")
    ] = 64 << 20
    segments: Annotated[
        int,
        Meta(ge=2, description="Number of segments to keep; the oldest is deleted first."),
    ] = 8
    resume: Annotated[
        bool,
        Meta(
            description="Save running requests in a folder next to the record; if the server is killed, the next one "
            "resumes them."
        ),
    ] = False
    resume_bytes: Annotated[
        int,
        Meta(
            ge=4096,
            description="Maximum size of the saved requests, and of the resumed responses that wait for clients; "
            "further requests are served without being saved.",
        ),
    ] = 256 << 20
    resume_keep_s: Annotated[
        float,
        Meta(gt=0, description="Time that a resumed response waits for its client."),
    ] = 600.0


class DeadlinesConfig(Section, frozen=True, kw_only=True):
    """Deadlines; every wait for another process has one."""

    ready_s: Annotated[
        float, Meta(gt=0, description="Maximum time for ranks to load and report ready.")
    ] = 300.0
    step_s: Annotated[
        float, Meta(gt=0, description="Maximum time for the result of a step, without its pauses.")
    ] = 120.0
    heartbeat_s: Annotated[
        float, Meta(gt=0, description="Heartbeat interval of an idle leader.")
    ] = 1.0
    rank_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Time without a message from the leader after which a rank stops."),
    ] = 15.0
    waiting_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum time that a request waits for its first step; 0 for no limit.",
        ),
    ] = 0.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum time for running requests to finish after the first Ctrl-C, or before their group is "
            "restarted.",
        ),
    ] = 30.0


@with_policy_tables("")
class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration."""

    placement: Annotated[
        Literal["auto", "separate", "together"],
        Meta(
            description="Run the two stages in separate processes or in one; `auto` is `together` if both stages are "
            "configured alike, either on one CUDA device, or on a CPU with at most 8 cores and weights of 256 MiB or "
            "more and no threads set; otherwise `separate`."
        ),
    ] = "auto"
    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    media: MediaConfig = MediaConfig()
    arena: ArenaConfig = ArenaConfig()
    encode: EncodeConfig = EncodeConfig()
    generate: GenerateConfig = GenerateConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    cluster: ClusterConfig = ClusterConfig()
    policy: Annotated[
        PolicyTable,
        Meta(
            description="One policy that makes several decisions with one state: those of the tables in `seats`, by "
            "default all that its class has methods for."
        ),
    ] = msgspec.field(default_factory=dict)
    policies: PoliciesConfig = PoliciesConfig()
    if TYPE_CHECKING:
        routing: PolicyTable = {}
        front_door: PolicyTable = {}
    deadlines: DeadlinesConfig = DeadlinesConfig()
    record: RecordConfig = RecordConfig()
    vllm: VllmConfig = VllmConfig()

    @property
    def ranks(self) -> int:
        """Total number of ranks of both stages, over all replicas; a rank that serves both counts twice."""
        return sum(self._ranks)

    def processes_on(self, host: str) -> int:
        """Number of rank processes that start on a host, unless some are lost."""
        count = self._starts("generate", self.generate, host)
        if self.placement != "together":
            count += self._starts("encode", self.encode, host)
        return count

    @property
    def on_ray(self) -> dict[tuple[str, int], dict[str, float]]:
        """Replicas that Ray places, by stage and number, with their resources."""
        stages: dict[Literal["encode", "generate"], int] = {"generate": self.generate.replicas}
        if self.placement != "together":
            stages = {"encode": self.encode.replicas, **stages}
        return {
            (stage, replica): self.resources(stage)
            for stage, replicas in stages.items()
            for replica in range(replicas)
            if self.cluster.first_host(stage, replica) == RAY_HOST
        }

    def resources(self, stage: Literal["encode", "generate"]) -> dict[str, float]:
        """Ray resources of a replica of a stage, or of both stages if they share processes."""
        cluster = self.cluster
        given = cluster.encode_resources if stage == "encode" else cluster.generate_resources
        if given:
            return given
        section = self.encode if stage == "encode" else self.generate
        sections = [section]
        if self.placement == "together" and self.encode.replicas:
            sections = [self.encode, self.generate]
        threads = max(one.threads or 1 for one in sections)
        found = {"CPU": float(section.tensor_parallel * threads)}
        if not all(one.on_cpu for one in sections):
            found["GPU"] = float(section.tensor_parallel)
        return found

    def _starts(self, stage: str, section: EncodeConfig | GenerateConfig, host: str) -> int:
        first = [self.cluster.first_host(stage, replica) for replica in range(section.replicas)]
        return section.tensor_parallel * first.count(host)

    def threads(self, stage: Literal["encode", "generate"]) -> int:
        """Number of threads that a rank of a stage computes with."""
        given = self.encode.threads if stage == "encode" else self.generate.threads
        processes = self.processes_on(OWN_HOST)
        return given or default_threads(usable_cores(), processes=processes)

    def threads_fixed_by(self, stage: Literal["encode", "generate"]) -> str:
        """Setting that fixes the number of threads of a stage's ranks; empty if ranks may use fewer.

        Stages in one process share its threads. Tensor-parallel ranks do not adapt: each would wait for the slowest.
        """
        stages = {"encode": self.encode, "generate": self.generate}
        section = stages[stage]
        if not section.on_cpu:
            return f"{stage}.device"
        shared = self.placement == "together" and self.encode.replicas > 0
        for name in stages if shared else (stage,):
            if stages[name].threads is not None:
                return f"{name}.threads"
        return f"{stage}.tensor_parallel" if section.tensor_parallel > 1 else ""

    def memory_limit(self, stage: str) -> int | None:
        """Memory limit of a rank for a stage, in bytes; 0 for none, None if its host decides."""
        section = self.encode if stage == "encode" else self.generate
        if section.memory_limit == "auto":
            return None if section.on_cpu else 0
        return size_bytes(section.memory_limit, path=f"{stage}.memory_limit")

    @property
    def encode_pauses(self) -> bool:
        """True if encode batches pause for generate steps in the same processes; not supported on GPUs yet."""
        together = self.placement == "together" and self.encode.replicas > 0
        return together and not self.encode.on_cuda and self.generate.step_target_ms > 0

    @property
    def text_alone(self) -> Config:
        """The same configuration without image input, encoders and image memory."""
        return msgspec.structs.replace(
            self,
            placement="separate",
            media=msgspec.structs.replace(self.media, images_max=0),
            encode=msgspec.structs.replace(self.encode, replicas=0),
        )

    @property
    def _ranks(self) -> tuple[int, int]:
        """Ranks of each stage."""
        encode, generate = self.encode, self.generate
        return (
            encode.replicas * encode.tensor_parallel,
            generate.replicas * generate.tensor_parallel,
        )


@cache
def config_keys() -> dict[str, msgspec.structs.FieldInfo]:
    """Return all keys by dotted path, in order of declaration; a policy table is one key."""
    return dict(_keys(Config, ""))


def _keys(
    section: type[msgspec.Struct], prefix: str
) -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from _keys(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field
