"""All configuration keys with their types, bounds, defaults and descriptions.

The descriptions appear in the JSON Schema and in `docs/config.md`. Sections are frozen: nothing is reloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vsched.config.adapters import AdaptersConfig
from vsched.config.byte_sizes import size_bytes
from vsched.config.cluster import OWN_HOST, RAY_HOST, ClusterConfig
from vsched.config.section import PolicyTable, Section
from vsched.config.stages import EncodeConfig, GenerateConfig
from vsched.worker.shares import default_threads, usable_cores


class ModelConfig(Section, frozen=True, kw_only=True):
    """The checkpoint."""

    path: Annotated[str, Meta(description="Folder of the checkpoint.")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Type of weights, KV cache and embeddings; `auto` is the checkpoint's."),
    ] = "auto"
    deterministic: Annotated[
        bool,
        Meta(
            description="Whether a request gets the same logits, bit for bit, alone and among others, however its "
            "prompt is cut, and after preemption or a restart. On a CPU in bfloat16 only; see docs/determinism.md."
        ),
    ] = False
    chat_template: Annotated[
        str,
        Meta(
            description="Chat template: a file, or the name of one of the checkpoint's; empty for its default."
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
            description="How the model writes calls of tools; `auto` is what its chat template writes."
        ),
    ] = "auto"
    reasoning_format: Annotated[
        Literal["auto", "none", "think", "mistral", "gemma4", "harmony"],
        Meta(
            description="How the model marks what it thinks before it answers: `think` is `<think>` and `</think>`, "
            "`mistral` is `[THINK]` and `[/THINK]`, `gemma4` and `harmony` are channels; "
            "`none` leaves it in the content; `auto` is as its template has it."
        ),
    ] = "auto"
    sampling_defaults: Annotated[
        bool,
        Meta(
            description="Whether a request without `temperature`, `top_p`, `top_k`, `min_p` or `repetition_penalty` "
            "gets that of the checkpoint's `generation_config.json`; otherwise it gets 1, or none."
        ),
    ] = True
    name: Annotated[
        str,
        Meta(description="Name that clients use; empty for the last part of `model.path`."),
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
            description="Processes that serve HTTP: 1 is the engine's own, several are beside it.",
        ),
    ] = 1
    api_key_variable: Annotated[
        str,
        Meta(description="Environment variable that holds the API key; empty to ask for none."),
    ] = ""
    admin_key_variable: Annotated[
        str,
        Meta(
            description="Environment variable that holds the key to `/admin/`; empty to open it to programs of this "
            "machine only, with the API key."
        ),
    ] = ""
    tenant_keys_variable: Annotated[
        str,
        Meta(
            description="Variable with one `tenant=key` a line, which open the API; empty for none."
        ),
    ] = ""
    tenant_header: Annotated[
        str,
        Meta(description="Header, set by a gateway, that says whose a request is; empty for none."),
    ] = ""
    tenants_max: Annotated[
        int,
        Meta(
            ge=1, description="Tenants with metrics of their own; those after them count together."
        ),
    ] = 64
    metrics_without_key: Annotated[
        bool, Meta(description="Whether `/metrics` answers without a key.")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Names by which clients call the server (`Host`), beside its addresses and `localhost`: "
            "`api.example.com`, `*.example.com`, or `*` for any. By default none on a loopback address, else any."
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins whose web pages may call the server, as `https://app.example.com`; `*` for any."
        ),
    ] = ()
    body_bytes_max: Annotated[int, Meta(ge=1024, description="Largest request body.")] = 32 << 20
    bodies_bytes_max: Annotated[
        int,
        Meta(
            ge=1024,
            description="Most bytes of request bodies above 64 KiB that are read or prepared at a time; further ones "
            "wait for half of `server.receive_s`, then get a 503.",
        ),
    ] = 256 << 20
    logprobs_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Most alternatives of a token that a request may ask for (`top_logprobs`). A request for the "
            "whole vocabulary (-1) asks for as many as it has.",
        ),
    ] = 20
    prompt_logprobs_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 22,
            description="Most log-probabilities of its prompt that a request may ask for: its tokens times one and the "
            "alternatives of each. One takes about 70 bytes of the answer.",
        ),
    ] = 1 << 18
    answers_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Most answers that a request may ask for: its prompts times `n`, or times `best_of`.",
        ),
    ] = 128
    strict_fields: Annotated[
        bool,
        Meta(
            description="Whether a field that nobody knows is refused within messages, content parts and others, "
            "too. In a request itself it always is."
        ),
    ] = False
    usage_always: Annotated[
        bool,
        Meta(
            description="Whether every event of a stream tells the usage so far, asked for or not, for gateways that "
            "count it."
        ),
    ] = False
    root_path: Annotated[
        str,
        Meta(
            description="What stands before every path where a proxy leaves it there, as `/llm`; paths without it are "
            "served, too. Empty for nothing."
        ),
    ] = ""
    headers_max: Annotated[int, Meta(ge=1, description="Most headers of a request.")] = 100
    header_bytes_max: Annotated[
        int, Meta(ge=1024, description="Most bytes of a request's URL and headers together.")
    ] = 32 << 10
    max_connections: Annotated[int, Meta(ge=1, description="Most connections at a time.")] = 1024
    receive_s: Annotated[
        float, Meta(gt=0, description="Longest time for a request to arrive, headers and body.")
    ] = 60.0
    send_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest time that a client may leave a full connection unread; its request ends with it.",
        ),
    ] = 60.0


class MediaConfig(Section, frozen=True, kw_only=True):
    """Images: allowed sources and sizes; `vsched.media.settings` uses these keys."""

    image_bytes_max: Annotated[int, Meta(ge=1, description="Largest image, encoded.")] = 20 << 20
    image_pixels_max: Annotated[
        int, Meta(ge=1, description="Largest image in pixels, known from its header.")
    ] = 64_000_000
    webp_pixels_max: Annotated[
        int, Meta(ge=1, description="Largest WEBP in pixels; its decoder stalls the server.")
    ] = 16_000_000
    images_max: Annotated[
        int, Meta(ge=0, description="Most images per request; 0 refuses all images.")
    ] = 64
    request_bytes_max: Annotated[
        int, Meta(ge=1, description="Most bytes of all encoded images of a request.")
    ] = 64 << 20
    directory: Annotated[
        str, Meta(description="Folder whose files `file:` URLs may name; empty for none.")
    ] = ""
    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts that images may be fetched from, as `host:port`, or as `host` for the ports 80 (http) "
            "and 443 (https)."
        ),
    ] = ()
    private_hosts: Annotated[
        tuple[str, ...],
        Meta(description="Those of `hosts` that may resolve to private or loopback addresses."),
    ] = ()
    allow_embeddings: Annotated[
        bool,
        Meta(description="Whether requests may contain embeddings (`image_embeds`)."),
    ] = False
    fetch_s: Annotated[float, Meta(gt=0, description="Longest time to fetch one image.")] = 10.0
    prepare_s: Annotated[
        float, Meta(gt=0, description="Longest preparation of a request, waiting included.")
    ] = 30.0
    preparing_max: Annotated[
        int, Meta(ge=1, description="Most requests in preparation; further ones get a 429.")
    ] = 512
    preparing_bytes_max: Annotated[
        int, Meta(ge=1, description="Most encoded bytes that requests in preparation hold.")
    ] = 512 << 20
    decode_bytes: Annotated[
        int, Meta(ge=1, description="Memory for decoding and preprocessing; images wait for it.")
    ] = 1 << 30
    threads: Annotated[int, Meta(ge=1, description="Threads that decode and preprocess.")] = 2
    plans_max: Annotated[int, Meta(ge=1, description="Images whose plan is remembered.")] = 8192


class ArenaConfig(Section, frozen=True, kw_only=True):
    """The shared memory between the engine and its ranks."""

    pixel_bytes: Annotated[
        int,
        Meta(
            ge=4096,
            description="Room for preprocessed images: those that wait for the encoder, and those that may be needed "
            "again, since each turn of a conversation contains all its images.",
        ),
    ] = 1 << 30
    embedding_bytes: Annotated[
        int, Meta(ge=4096, description="Room for embeddings, in use and cached.")
    ] = 256 << 20


class PoliciesConfig(Section, frozen=True, kw_only=True):
    """Time limits of policy calls."""

    call_budget_ms: Annotated[
        float,
        Meta(ge=0, description="Longest time of a call of a policy; 0 for no limit."),
    ] = 50.0
    slow_calls_max: Annotated[
        int,
        Meta(
            ge=0,
            le=99,
            description="Calls over that time, of the latest 100 of a policy, after which the default decides in its "
            "place until the server is started again.",
        ),
    ] = 10


class RecordConfig(Section, frozen=True, kw_only=True):
    """The record of the scheduler's events and decisions, for `vsched replay`."""

    path: Annotated[str, Meta(description="File of the record; empty to record nothing.")] = ""
    segment_bytes: Annotated[
        int, Meta(ge=4096, description="Size at which a new segment begins.")
    ] = 64 << 20
    segments: Annotated[
        int,
        Meta(ge=2, description="Number of segments that are kept; the oldest is deleted first."),
    ] = 8
    resume: Annotated[
        bool,
        Meta(
            description="Keep requests in a folder beside the record while they are answered; the server that starts "
            "after one that was killed goes on with them."
        ),
    ] = False
    resume_bytes: Annotated[
        int,
        Meta(
            ge=4096,
            description="Most bytes of requests in that folder, and of answers that wait for clients; requests beyond "
            "it are served, and not kept.",
        ),
    ] = 256 << 20
    resume_keep_s: Annotated[
        float,
        Meta(gt=0, description="How long an answer that was resumed waits for its client."),
    ] = 600.0


class DeadlinesConfig(Section, frozen=True, kw_only=True):
    """Deadlines; every wait for another process has one."""

    ready_s: Annotated[
        float, Meta(gt=0, description="Longest time for ranks to load and report ready.")
    ] = 300.0
    step_s: Annotated[
        float, Meta(gt=0, description="Longest time for the result of a step, without its pauses.")
    ] = 120.0
    heartbeat_s: Annotated[
        float, Meta(gt=0, description="Interval of heartbeats of an idle leader.")
    ] = 1.0
    rank_timeout_s: Annotated[
        float, Meta(gt=0, description="Silence of the leader after which a rank stops.")
    ] = 15.0
    waiting_s: Annotated[
        float,
        Meta(ge=0, description="Longest wait of a request for its first step; 0 for no limit."),
    ] = 0.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Longest time for running requests to finish after the first Ctrl-C, or before their group is "
            "restarted.",
        ),
    ] = 30.0


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration."""

    placement: Annotated[
        Literal["auto", "separate", "together"],
        Meta(
            description="Whether the two stages run in processes of their own, or in one; `auto` is `together` on a "
            "CPU of at most 8 cores with weights of 256 MiB or more, where both stages are configured alike and no "
            "threads are set, else `separate`."
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
    routing: Annotated[PolicyTable, Meta(description="Which replica serves a request.")] = (
        msgspec.field(default_factory=partial(dict, use="least-loaded"))
    )
    front_door: Annotated[
        PolicyTable,
        Meta(description="Which requests come in, before anything is done for them."),
    ] = msgspec.field(default_factory=partial(dict, use="open"))
    policies: PoliciesConfig = PoliciesConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    record: RecordConfig = RecordConfig()

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
        on_gpu = self.encode.device.startswith("cuda")
        together = self.placement == "together" and self.encode.replicas > 0
        return together and not on_gpu and self.generate.step_target_ms > 0

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


POLICY_TABLES = {
    "encode.admission": "admission",
    "encode.encoding": "encoding",
    "encode.dispatch": "dispatch",
    "encode.eviction": "eviction",
    "encode.reclaim": "reclaim",
    "generate.admission": "admission",
    "generate.memory": "memory",
    "generate.preemption": "preemption",
    "generate.eviction": "eviction",
    "generate.insertion": "insertion",
    "generate.drafting": "drafting",
    "generate.step": "step",
    "routing": "routing",
    "front_door": "front_door",
}
"""Policy kind of each policy table."""


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
