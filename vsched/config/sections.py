"""All configuration keys with their types, bounds, defaults and descriptions.

The text after a key is its description, in the JSON Schema and in `docs/config.md` (`vsched.config.document`). Sections
are frozen: nothing is reloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from vsched.errors import ConfigError
from vsched.policy import DECISIONS
from vsched.worker.spec import THREADS_MAX, default_threads, usable_cores

PolicyTable = dict[str, Any]
"""`{use = "name", **fields}`: a registered policy or `my_pkg.module:Class`, and its fields."""

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
_TIME_MAX = 1_000_000
"""Maximum of times: larger ones overflow timers of libraries."""
Seconds = Annotated[float, Meta(gt=0, le=_TIME_MAX)]
TimeOrZero = Annotated[float, Meta(ge=0, le=_TIME_MAX)]


def form(pattern: str, description: str) -> Meta:
    """Return the constraint of a text; `description` completes "limit" in errors."""
    return Meta(pattern=f"^({pattern})$", description=description)


_SIZE = r"\s*\d+(\.\d+)?\s*(B|[KMGT]iB)?\s*"
_SIZES = "a number of bytes, or one with a unit (B, KiB, MiB, GiB, TiB) as 4GiB"
Size = NonNegative | Annotated[str, form(_SIZE, _SIZES)]
"""Bytes: a number, or text such as `4GiB`."""
_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
_AT_PORT = r"(\[[0-9a-fA-F:.]+\]|[^:/\s]+):\d{1,5}"
_HOST = rf"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:{_PORT})?"
_NAME = "a name such as api.example.com, without a port, or * for any"
_ORIGIN = "scheme, name and port such as https://app.example.com, without a path, or * for any"
_IMAGE_HOST = "host or host:port, as images.example.com or [::1]:8080, without scheme and path"
ServerName = Annotated[str, form(r"\*|(\*\.)?[^*/:\s]+", _NAME)]
Origin = Annotated[str, form(rf"\*|[a-z][a-z0-9+.-]*://{_HOST}", _ORIGIN)]
ImageHost = Annotated[str, form(_HOST, _IMAGE_HOST)]
HostAddress = Annotated[str, form(f"tcp://{_AT_PORT}", "tcp://HOST:PORT, as of vsched host")]
OWN_HOST = "local"
"""Name of the engine's own host in lists of hosts."""
RAY_HOST = "ray"
"""Host name of replicas that Ray places."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file."""


Keys = TypeVar("Keys", bound=msgspec.Struct)


def with_policy_tables(section: str) -> Callable[[type[Keys]], type[Keys]]:
    """Add the policy tables of a section to its class, as the decisions declare them.

    In the classes, policy tables are listed for type checkers only.
    """

    def add(cls: type[Keys]) -> type[Keys]:
        tables = [table for decision in DECISIONS.values() for table in decision.selected_by]
        keys: list[Any] = [
            (
                name,
                PolicyTable,
                msgspec.field(default_factory=partial(dict, use=table.use)),
            )
            for table in tables
            for parent, _, name in (table.path.rpartition("."),)
            if parent == section
        ]
        whole = msgspec.defstruct(
            cls.__name__,
            keys,
            bases=(cls,),
            module=cls.__module__,
            namespace={"__doc__": cls.__doc__, "__qualname__": cls.__qualname__},
            frozen=True,
            kw_only=True,
        )
        return cast("type[Keys]", whole)

    return add


_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def size_bytes(size: int | str, *, path: str) -> int:
    """Parse a number of bytes, or a text such as `1.5GiB`.

    Raises:
        ConfigError: If it is not a size; the message starts with `path`.
    """
    found = _FORM.fullmatch(str(size))
    if found is None or found[2] not in _UNITS:
        raise ConfigError.of_limit(
            f"{path}: not a size",
            value=repr(size),
            limit=f"a number, or one with a unit ({', '.join(filter(None, _UNITS))})",
            remedy="write it like 4GiB",
        )
    return int(float(found[1]) * _UNITS[found[2]])


class AdaptersConfig(Section, frozen=True, kw_only=True):
    """LoRA adapters: how many can be loaded, and from which folders; see docs/adapters.md."""

    count_max: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Maximum number of loaded adapters; 0 for none. Each rank allocates memory for all of them at start, each with
    rank `adapters.rank_max` on all layers."""
    rank_max: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Maximum rank of an adapter."""
    encoder: bool = False
    """Allow adapters that change the vision tower; encode ranks then allocate memory for them."""
    load: dict[str, str] = msgspec.field(default_factory=dict)
    """Folders of the adapters to load at start, by name: `{sql = "/adapters/sql"}`."""
    directory: str = ""
    """Folder of the adapters that may be loaded while the server runs; empty for none."""
    load_s: Seconds = 60.0
    """Maximum time for all ranks to add an adapter."""


AUTO = "auto"
CPU = "cpu"


class StageConfig(Section, frozen=True, kw_only=True):
    """Keys of both stages: their processes, and the machine resources of these."""

    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of replicas of the stage, each with its own copy of the model."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of ranks that share the model of a replica (tensor parallelism)."""
    plugin: str = "transformers"
    """Worker plug-in that runs the model."""
    weights: Literal["auto", "int8", "int4"] = "auto"
    """Weight quantization while loading, on a CPU: `int8` or `int4`, with a scale for each group of inputs; the LM
    head and the embedding are int8 in both cases. `auto` keeps the checkpoint's weights."""
    weights_group: Annotated[int, Meta(ge=0, le=128, multiple_of=16)] = 0
    """Group size of weight quantization: the inputs of an output that share a scale; 0 for 128 with int8 and 32 with
    int4."""
    activations: Literal["auto", "float", "int8"] = "auto"
    """Activation type in products with int8 or 4-bit weights, on a CPU: `float`, or `int8`, with dynamic quantization
    in blocks. `auto` is `int8` in bfloat16 if the processor has instructions for it, otherwise `float`. With AMX,
    `auto` and `float` keep the activations of more than 16 tokens in floating point and dequantize the weights to
    bfloat16."""
    device: Annotated[
        str, form(r"(?!cuda).*|cuda(:\d+)?", "auto, cpu, cuda, or cuda:N with a number")
    ] = AUTO
    """Device of the stage; with `cuda:N`, the ranks of all replicas take consecutive devices from N on. `auto` is CUDA
    if the host has a usable device, otherwise `cpu`; `vsched check` reports the choice. See docs/gpu.md."""
    threads: Annotated[int, Meta(ge=1, le=THREADS_MAX)] | None = None
    """Fixed number of compute threads per rank. By default the cores of the machine are divided among the processes of
    all ranks, at least 1 each, and a rank uses fewer threads while other programs keep the cores busy."""
    memory_limit: NonNegative | Annotated[str, form(f"auto|{_SIZE}", f"auto, {_SIZES}")] = "auto"
    """Hard limit on the private memory of a rank, such as `4GiB`; 0 for none. `auto` is none except on `cpu`: there it
    is the weights, the KV cache of the longest context and, of the available memory of the host that the weights of all
    ranks leave at start, the larger of 4 GiB and an eighth, but at most a quarter; in all, next to the weights, at most
    1 / (ranks + 1)."""

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
            "activations": self.activations,
        }


@with_policy_tables("encode")
class EncodeConfig(StageConfig, frozen=True, kw_only=True):
    """The encode stage: images to embeddings."""

    replicas: Annotated[int, Meta(ge=0, le=64)] = 1
    """Number of replicas of the stage, each with its own copy of the model; 0 to serve only text, like a checkpoint
    without a vision part."""
    reserved: NonNegative | Annotated[str, form(f"({_SIZE})?", f"empty, {_SIZES}")] = ""
    """Memory for the largest batch of images, such as `4GiB`; empty to measure it at start by running one."""
    if TYPE_CHECKING:  # as `with_policy_tables` adds it
        admission: PolicyTable = {}
        encoding: PolicyTable = {}
        dispatch: PolicyTable = {}
        reclaim: PolicyTable = {}
        eviction: PolicyTable = {}


@with_policy_tables("generate")
class GenerateConfig(StageConfig, frozen=True, kw_only=True):
    """The generate stage: prefill and decode."""

    attention: str = "auto"
    """Attention implementation; `auto` is the fastest on the machine, `exact` uses the modules of transformers even on
    a CPU in bfloat16."""
    block_size: Annotated[int, Meta(ge=1, le=256)] = 16
    """Number of tokens in a KV block."""
    max_batch_tokens: NonNegative = 0
    """Maximum number of tokens in a step, prefill and decode together; 0 for 2048 on a CPU, 8192 with CUDA."""
    chunk_tokens: NonNegative = 0
    """Maximum number of prompt tokens of one request in a step; 0 for 512 on a CPU, 8192 with CUDA, but at most
    `max_batch_tokens`."""
    prefill_target_ms: TimeOrZero = 500.0
    """Target for the time of a step in which no request decodes, since later requests wait for it; 0 for no limit. It
    may always take `step_target_ratio` times as long as a decode."""
    step_target_ms: TimeOrZero = 100.0
    """Target for the time of a step: while requests decode, prefill is limited to it, and so is encoding in the same
    processes; 0 for no limit. It is lower when more than 5 requests decode for each waiting one."""
    step_target_ratio: Annotated[float, Meta(ge=1.5)] = 8.0
    """A step with prefill may always take this many times as long as one without, in case the decodes of a large model
    alone come close to `step_target_ms`; lower as that is, but at least 1.75. Up to twice as many if more than two
    requests wait for each decoding one."""
    slots: NonNegative = 0
    """Maximum number of running requests; 0 for 64 on a CPU, 256 with CUDA."""
    max_waiting: Positive = 1024
    """Maximum number of waiting requests; further ones get a 429."""
    max_waiting_bytes: Positive = 1 << 30
    """Maximum memory held by waiting requests; further ones get a 429."""
    context_tokens: NonNegative = 0
    """Maximum length of prompt and output together; 0 for the checkpoint's."""
    kv_pages: Literal["on_use", "at_start"] = "on_use"
    """Time at which the host allocates the pages of the KV cache on a CPU: on first use, if the process's limit counts
    reserved memory and the host reports its free memory, or all at start; see docs/memory.md."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """Data type of the KV cache: `int8`, on a CPU, with one scale for each head of a token, takes about half of the
    memory of bfloat16; see docs/memory.md. `auto` is the type of the model."""
    prefix_cache: bool = True
    """Keep the KV blocks of finished requests for later prompts."""
    swap_memory: Size = 0
    """Host memory of each rank for KV blocks of preempted requests, such as `4GiB`, if `generate.preemption` swaps
    them; 0 for none. It is not part of `generate.memory_limit`. See docs/swapping.md."""
    state_snapshots: Annotated[int, Meta(ge=0)] | None = None
    """Number of recurrent state snapshots kept for later prompts, in models with recurrent layers; by default the
    number of `slots`, at most 64. 0 disables their prefix cache."""
    draft_model: str = ""
    """Draft model for `generate.drafting`, a smaller checkpoint with the same vocabulary: named as `model.path`; empty
    for none. See docs/speculative-decoding.md."""
    if TYPE_CHECKING:
        admission: PolicyTable = {}
        step: PolicyTable = {}
        preemption: PolicyTable = {}
        eviction: PolicyTable = {}
        insertion: PolicyTable = {}
        memory: PolicyTable = {}
        drafting: PolicyTable = {}


class ClusterConfig(Section, frozen=True, kw_only=True):
    """Other hosts for ranks; see docs/hosts.md."""

    hosts: dict[str, HostAddress] = msgspec.field(default_factory=dict)
    """Addresses of the hosts that run `vsched host`, by name: `{far = "tcp://10.0.0.2:7700"}`. `local` is the name of
    this host."""
    key_file: str = ""
    """File with the secret shared by the engine and the hosts; `vsched host --make-key` creates one."""
    encode: list[str] = msgspec.field(default_factory=list)
    """Hosts for the replicas of the encode stage, in turn; empty for this host, or for Ray if `ray` is set."""
    generate: list[str] = msgspec.field(default_factory=list)
    """Hosts for the replicas of the generate stage, in turn; empty for this host, or for Ray if `ray` is set. With
    `placement = "together"`, for the replicas of both stages."""
    connect_s: Seconds = 10.0
    """Time to wait for a host before the next one in the list is tried."""
    ray: Annotated[
        str, form(f"(auto|{_AT_PORT})?", "auto, or HOST:PORT as `ray start --head` printed it")
    ] = ""
    """Address of the Ray cluster that places replicas, HOST:PORT, or `auto` for the cluster of this host; empty for
    none. Needs `pip install 'vsched[ray]'`."""
    ray_group: str = ""
    """Name of an existing Ray placement group, whose bundles the replicas take in turn, those of the encode stage
    first; empty to create one."""
    ray_strategy: Literal["pack", "spread", "strict-pack", "strict-spread"] = "pack"
    """Ray's placement strategy for the bundles of replicas."""
    encode_resources: dict[str, float] = msgspec.field(default_factory=dict)
    """Ray resources of a replica of the encode stage: `{CPU = 4, fast_cpu = 1}`. By default one CPU per thread of its
    ranks, or per rank if `threads` is not set, and one GPU per rank on a GPU."""
    generate_resources: dict[str, float] = msgspec.field(default_factory=dict)
    """Ray resources of a replica of the generate stage; with `placement = "together"`, of both stages."""

    def hosts_of(self, stage: str) -> list[str]:
        """Hosts on which the replicas of a stage start, in turn; for stages in one process, use `generate`."""
        names = self.encode if stage == "encode" else self.generate
        return names or [RAY_HOST if self.ray else OWN_HOST]

    def first_host(self, stage: str, replica: int) -> str:
        """Host on which a replica starts first."""
        names = self.hosts_of(stage)
        return names[replica % len(names)]

    @property
    def used(self) -> set[str]:
        """Names of all hosts on which replicas may start."""
        return {*self.hosts_of("encode"), *self.hosts_of("generate")}

    @property
    def elsewhere(self) -> bool:
        """True if ranks run on other hosts."""
        return not self.used <= {OWN_HOST}


class ModelConfig(Section, frozen=True, kw_only=True):
    """The checkpoint."""

    path: str = ""
    """Checkpoint: a folder, `ORG/NAME[@REVISION]` of the Hugging Face hub, or a GGUF file."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights, KV cache and embeddings; `auto` is the checkpoint's, but with CUDA bfloat16 instead of
    float32, and float16 on devices without bfloat16."""
    deterministic: bool = False
    """Make the logits of a request bitwise equal in any batch, with any chunking of its prompt, and after preemption
    or a restart. Only on a CPU in bfloat16; see docs/determinism.md."""
    chat_template: str = ""
    """Chat template: a file, or the name of a template in the checkpoint; empty for its default."""
    tool_format: Literal[
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
    ] = "auto"
    """Tool-call format of the model; `auto` derives it from the chat template."""
    reasoning_format: Literal["auto", "none", "think", "mistral", "gemma4", "harmony"] = "auto"
    """Reasoning markers of the model: `<think>` and `</think>` for `think`, `[THINK]` and `[/THINK]` for `mistral`,
    channels for `gemma4` and `harmony`; `none` leaves reasoning in the content; `auto` derives it from the chat
    template."""
    sampling_defaults: bool = True
    """Use the checkpoint's `generation_config.json` for `temperature`, `top_p`, `top_k`, `min_p` and
    `repetition_penalty` if a request does not set them; otherwise they are 1 or disabled."""
    name: str = ""
    """Model name for clients; empty for the last component of `model.path`."""

    @property
    def served_name(self) -> str:
        """The name that clients use."""
        return self.name or Path(self.path).name


class ServerConfig(Section, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, form(r"\S+", "an address, or 0.0.0.0 or :: for all")] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port to listen on; 0 lets the system choose."""
    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of processes that serve HTTP: 1 means the engine's own process, more are separate API processes."""
    api_key_variable: str = ""
    """Environment variable with the API key; empty for no key."""
    admin_key_variable: str = ""
    """Environment variable with the key for `/admin/`; empty to open it to local programs only, with the API key."""
    tenant_keys_variable: str = ""
    """Environment variable with API keys of tenants, one `tenant=key` per line; empty for none."""
    tenant_header: Annotated[str, form("[A-Za-z0-9-]*", "letters, digits, hyphens")] = ""
    """Header with the tenant of a request, set by a gateway; empty for none."""
    tenants_max: Positive = 64
    """Number of tenants with their own metrics; the others are counted together."""
    metrics_without_key: bool = False
    """Serve `/metrics` without a key."""
    vllm_metrics: bool = False
    """Also serve metrics under vLLM's names, such as `vllm:num_requests_running`."""
    access_log: bool = False
    """Log method, path, status, duration and id of each request, except successful probes. Queries and contents are
    never logged."""
    otlp_endpoint: Annotated[
        str,
        form(
            r"(https?://[^/\s?#]+(/[^\s?#]*)?)?",
            "http:// or https://; gRPC is not supported",
        ),
    ] = ""
    """Base URL of an OpenTelemetry collector that receives the traces of requests, such as `http://127.0.0.1:4318`
    (OTLP over HTTP); empty to take it from `OTEL_EXPORTER_OTLP_ENDPOINT`. Needs `pip install 'vsched[otel]'`."""
    allowed_hosts: tuple[ServerName, ...] = ()
    """Names of the server that are accepted in `Host`, in addition to its addresses and `localhost`:
    `api.example.com`, `*.example.com`, or `*` for any. By default none on a loopback address, otherwise any."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of web pages that may call the server, such as `https://app.example.com`; `*` for any."""
    body_bytes_max: Annotated[int, Meta(ge=1024)] = 32 << 20
    """Maximum size of a request body."""
    bodies_bytes_max: Annotated[int, Meta(ge=1024)] = 256 << 20
    """Maximum total size of request bodies above 64 KiB that are being read or prepared; further ones wait for half of
    `server.receive_s`, then get a 503."""
    logprobs_max: Positive = 20
    """Maximum number of alternatives per token that a request may ask for (`top_logprobs`). The whole vocabulary (-1)
    counts with its size."""
    prompt_logprobs_max: Annotated[int, Meta(ge=1, le=1 << 22)] = 1 << 18
    """Maximum number of prompt log-probabilities in a request: prompt tokens times (1 + alternatives per token). Each
    takes about 70 bytes of the response."""
    choices_max: Positive = 128
    """Maximum number of choices in a request: its prompts times `n`, or times `best_of`."""
    strict_fields: bool = False
    """Refuse unknown fields within messages, content parts and other nested objects. At the top level of a request,
    they are always refused."""
    usage_always: bool = False
    """Include the usage so far in every stream event, even if not requested, for gateways that count it."""
    root_path: Annotated[
        str, form(r"(/[A-Za-z0-9._~-]+)*", "a path such as /llm, without a / at its end")
    ] = ""
    """Path prefix that a proxy does not remove, such as `/llm`; paths without it are served, too. Empty for none."""
    headers_max: Positive = 100
    """Maximum number of headers in a request."""
    header_bytes_max: Annotated[int, Meta(ge=1024)] = 32 << 10
    """Maximum total size of a request's URL and headers."""
    max_connections: Positive = 1024
    """Maximum number of open connections."""
    receive_s: Seconds = 60.0
    """Maximum time for a request, headers and body, to arrive."""
    send_s: Seconds = 60.0
    """Maximum time that a client may leave a full connection unread; after it, its request is aborted."""


@with_policy_tables("media")
class MediaConfig(Section, frozen=True, kw_only=True):
    """Images and videos: allowed sources and sizes."""

    image_bytes_max: Positive = 20 << 20
    """Maximum size of an encoded image."""
    image_pixels_max: Positive = 64_000_000
    """Maximum number of pixels of an image, read from its header."""
    images_max: NonNegative = 64
    """Maximum number of images per request; 0 refuses all images."""
    videos_max: NonNegative = 4
    """Maximum number of videos per request, each of which counts as an image, too; 0 refuses all videos."""
    video_bytes_max: Positive = 64 << 20
    """Maximum size of a video file."""
    video_frames_max: Positive = 768
    """Maximum number of frames that are sampled from a video."""
    video_seconds_max: Seconds = 3600.0
    """Maximum duration of a video."""
    video_decode_s: Seconds = 20.0
    """Maximum CPU time for decoding a video."""
    request_bytes_max: Positive = 64 << 20
    """Maximum total size of the encoded images and videos of a request."""
    directory: str = ""
    """Folder of the files that `file:` URLs may name; empty for none."""
    hosts: tuple[ImageHost, ...] = ()
    """Hosts from which images may be fetched, as `host:port`, or as `host` for ports 80 (http) and 443 (https)."""
    private_hosts: tuple[ImageHost, ...] = ()
    """Hosts in `hosts` that may resolve to private or loopback addresses."""
    allow_embeddings: bool = False
    """Accept embeddings in requests (`image_embeds`, `video_embeds`)."""
    fetch_s: Seconds = 10.0
    """Maximum time to fetch one image."""
    prepare_s: Seconds = 30.0
    """Maximum time to prepare a request, including waits."""
    preparing_max: Positive = 512
    """Maximum number of requests in preparation; further ones get a 429."""
    preparing_bytes_max: Positive = 512 << 20
    """Maximum encoded bytes held by requests in preparation."""
    decode_bytes: Positive = 1 << 30
    """Memory for decoding and preprocessing; images wait for it."""
    threads: Positive = 2
    """Number of threads for decoding and preprocessing."""
    if TYPE_CHECKING:
        pruning: PolicyTable = {}


class ArenaConfig(Section, frozen=True, kw_only=True):
    """The shared memory between the engine and its ranks."""

    pixel_bytes: NonNegative = 0
    """Memory for preprocessed images: waiting for the encoder, or cached, because each turn of a conversation contains
    all its images; 0 for 1 GiB on a CPU, 4 GiB with CUDA."""
    embedding_bytes: NonNegative = 0
    """Memory for embeddings, in use and cached; 0 for 256 MiB on a CPU, 1 GiB with CUDA."""


class PoliciesConfig(Section, frozen=True, kw_only=True):
    """Time limits of policy calls."""

    call_budget_ms: Annotated[float, Meta(ge=0)] = 50.0
    """Maximum time of a policy call; 0 for no limit."""
    slow_calls_max: Annotated[int, Meta(ge=0, le=99)] = 10
    """Number of calls over `call_budget_ms`, in the last 100 calls of a policy, after which the default replaces it
    until the server is restarted."""
    call_limit_s: Annotated[float, Meta(ge=0, le=3600)] = 5.0
    """Time after which a call is interrupted and the default replaces the policy, at most a third of
    `deadlines.rank_timeout_s`; 0 for never."""
    passed_over_max_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """Longest time for which policies may hold a request in one place, or let younger ones pass it; then it goes
    first."""


class VllmConfig(Section, frozen=True, kw_only=True):
    """The bridge to vLLM; without effect in vsched's server and in simulations. See docs/policies-in-vllm.md."""

    trace: str = ""
    """File for the arrivals of a run inside vLLM, for `vsched simulate --trace`; its times are in a file of the same
    name with `.run`. Empty for none."""
    statistics: bool = False
    """Write figures once per second, which `GET /vsched` of `Middleware` returns."""


class RecordConfig(Section, frozen=True, kw_only=True):
    """The record of the scheduler's events and decisions, for `vsched replay`."""

    path: str = ""
    """File for the record; empty for no record."""
    segment_bytes: Annotated[int, Meta(ge=4096)] = 64 << 20
    """Size at which a new segment is started."""
    segments: Annotated[int, Meta(ge=2)] = 8
    """Number of segments to keep; the oldest is deleted first."""
    resume: bool = False
    """Save running requests in a folder next to the record; if the server is killed, the next one resumes them."""
    resume_bytes: Annotated[int, Meta(ge=4096)] = 256 << 20
    """Maximum size of the saved requests, and of the resumed responses that wait for clients; further requests are
    served without being saved."""
    resume_keep_s: Seconds = 600.0
    """Time that a resumed response waits for its client."""


class DeadlinesConfig(Section, frozen=True, kw_only=True):
    """Deadlines; every wait for another process has one."""

    ready_s: Seconds = 300.0
    """Maximum time for ranks to load and report ready."""
    step_s: Seconds = 120.0
    """Maximum time for the result of a step, without its pauses."""
    heartbeat_s: Seconds = 1.0
    """Heartbeat interval of an idle leader."""
    rank_timeout_s: Seconds = 15.0
    """Time without a message from the leader after which a rank stops."""
    waiting_s: TimeOrZero = 0.0
    """Maximum time that a request waits for its first step; 0 for no limit."""
    drain_s: TimeOrZero = 30.0
    """Maximum time for running requests to finish after the first Ctrl-C, or before their group is restarted."""


@with_policy_tables("")
class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration."""

    placement: Literal["auto", "separate", "together"] = "auto"
    """Run the two stages in separate processes or in one; `auto` is `together` if both stages are configured alike,
    either on one CUDA device, or on a CPU with at most 8 cores and weights of 256 MiB or more and no threads set;
    otherwise `separate`."""
    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    media: MediaConfig = MediaConfig()
    arena: ArenaConfig = ArenaConfig()
    encode: EncodeConfig = EncodeConfig()
    generate: GenerateConfig = GenerateConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    cluster: ClusterConfig = ClusterConfig()
    policy: PolicyTable = msgspec.field(default_factory=dict)
    """One policy that makes several decisions with one state: those of the tables in `seats`, by default all that its
    class has methods for."""
    policies: PoliciesConfig = PoliciesConfig()
    if TYPE_CHECKING:
        routing: PolicyTable = {}
        arrival: PolicyTable = {}
    deadlines: DeadlinesConfig = DeadlinesConfig()
    record: RecordConfig = RecordConfig()
    vllm: VllmConfig = VllmConfig()

    def stage(self, name: str) -> EncodeConfig | GenerateConfig:
        """Section of a stage, `encode` or `generate`."""
        return self.encode if name == "encode" else self.generate

    @property
    def together(self) -> bool:
        """True if both stages run in the same processes."""
        return self.placement == "together" and self.encode.replicas > 0

    @property
    def ranks(self) -> int:
        """Total number of ranks of both stages, over all replicas; a rank that serves both counts twice."""
        return sum(one.replicas * one.tensor_parallel for one in (self.encode, self.generate))

    @property
    def _started(self) -> list[tuple[str, int]]:
        """Stage and number of each replica that has processes of its own."""
        stages = ["generate"] if self.placement == "together" else ["encode", "generate"]
        return [(stage, number) for stage in stages for number in range(self.stage(stage).replicas)]

    def processes_on(self, host: str) -> int:
        """Number of rank processes that start on a host, unless some are lost."""
        return sum(
            self.stage(stage).tensor_parallel
            for stage, replica in self._started
            if self.cluster.first_host(stage, replica) == host
        )

    @property
    def on_ray(self) -> dict[tuple[str, int], dict[str, float]]:
        """Replicas that Ray places, by stage and number, with their resources."""
        return {
            (stage, replica): self.resources(stage)
            for stage, replica in self._started
            if self.cluster.first_host(stage, replica) == RAY_HOST
        }

    def resources(self, stage: str) -> dict[str, float]:
        """Ray resources of a replica of a stage, or of both stages if they share processes."""
        cluster = self.cluster
        given = cluster.encode_resources if stage == "encode" else cluster.generate_resources
        if given:
            return given
        section = self.stage(stage)
        sections = [self.encode, self.generate] if self.together else [section]
        threads = max(one.threads or 1 for one in sections)
        found = {"CPU": float(section.tensor_parallel * threads)}
        if not all(one.on_cpu for one in sections):
            found["GPU"] = float(section.tensor_parallel)
        return found

    def threads(self, stage: str) -> int:
        """Number of threads that a rank of a stage computes with."""
        processes = self.processes_on(OWN_HOST)
        return self.stage(stage).threads or default_threads(usable_cores(), processes=processes)

    def threads_fixed_by(self, stage: str) -> str:
        """Setting that fixes the number of threads of a stage's ranks; empty if ranks may use fewer.

        Stages in one process share its threads. Tensor-parallel ranks do not adapt: each would wait for the slowest.
        """
        section = self.stage(stage)
        if not section.on_cpu:
            return f"{stage}.device"
        for name in ("encode", "generate") if self.together else (stage,):
            if self.stage(name).threads is not None:
                return f"{name}.threads"
        return f"{stage}.tensor_parallel" if section.tensor_parallel > 1 else ""

    def memory_limit(self, stage: str) -> int | None:
        """Memory limit of a rank for a stage, in bytes; 0 for none, None if its host decides."""
        section = self.stage(stage)
        if section.memory_limit == "auto":
            return None if section.on_cpu else 0
        return size_bytes(section.memory_limit, path=f"{stage}.memory_limit")

    @property
    def encode_pauses(self) -> bool:
        """True if encode batches pause for generate steps in the same processes; not supported on GPUs yet."""
        return self.together and not self.encode.on_cuda and self.generate.step_target_ms > 0

    @property
    def text_alone(self) -> Config:
        """The same configuration without image input, encoders and image memory."""
        return msgspec.structs.replace(
            self,
            placement="separate",
            media=msgspec.structs.replace(self.media, images_max=0),
            encode=msgspec.structs.replace(self.encode, replicas=0),
        )


@cache
def config_keys() -> dict[str, msgspec.structs.FieldInfo]:
    """Return all keys by dotted path, in order of declaration; a policy table is one key."""
    keys = {}
    for field in msgspec.structs.fields(Config):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            for inner in msgspec.structs.fields(field.type):
                keys[f"{field.name}.{inner.name}"] = inner
        else:
            keys[field.name] = field
    return keys
