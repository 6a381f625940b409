"""Table of the flags of `vllm serve`: a configuration key, no effect, or refused, with the reason.

The names are those of vLLM 0.11 to 0.33. `docs/reference/vllm-flags.md` is generated from this table by
`vsched config vllm-flags`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vsched.cli.vllm import values as to
from vsched.cli.vllm.values import ADAPTERS, Convert

SEVERAL = -1


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """A flag, or several with one outcome.

    Attributes:
        names: Long names first.
        outcome: `set` for configuration keys.
        keys: The keys that it sets, for the documentation.
        note: Reason, remedy, or difference from vLLM.
        values: Number of words after the flag; 0 for a switch, which also has a `--no-` form.
        convert: Assignments for the words; for a flag without effect, a check of them.
        convert_no: Assignments of the `--no-` form, None if it has no effect.
    """

    names: tuple[str, ...]
    outcome: Literal["set", "no effect", "refused"]
    keys: tuple[str, ...] = ()
    note: str = ""
    values: int = 1
    convert: Convert | None = None
    convert_no: Convert | None = None


def _set(
    names: str, key: str, convert: Convert | None = None, *, note: str = "", values: int = 1
) -> Flag:
    keys = tuple(key.split())
    return Flag(
        names=tuple(names.split()),
        outcome="set",
        keys=keys,
        note=note,
        values=values,
        convert=convert or to.text(keys[0]),
    )


def _switch(names: str, key: str, on: str = "true", off: str = "", *, note: str = "") -> Flag:
    return Flag(
        names=tuple(names.split()),
        outcome="set",
        keys=(key,),
        note=note,
        values=0,
        convert=lambda _: {key: on},
        convert_no=(lambda _: {key: off}) if off else None,
    )


def _ignored(names: str, note: str, *, values: int = 1, check: Convert | None = None) -> Flag:
    return Flag(
        names=tuple(names.split()), outcome="no effect", note=note, values=values, convert=check
    )


def _refused(names: str, note: str, *, values: int = 1) -> Flag:
    return Flag(names=tuple(names.split()), outcome="refused", note=note, values=values)


TOOL_FORMATS = {
    "hermes": "hermes",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek-v3.1",
    "mistral": "auto",
    "llama3_json": "llama-json",
    "llama4_json": "llama-json",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "qwen3_coder": "qwen3-coder",
    "qwen3_xml": "qwen3-coder",
    "glm45": "glm",
    "glm47": "glm",
    "minimax_m2": "minimax",
    "gemma4": "gemma4",
    "openai": "harmony",
}
"""Values of `model.tool_format`, by vLLM's parser."""
REASONING_FORMATS = {
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "qwen3": "think",
    "glm45": "think",
    "mistral": "mistral",
    "gemma4": "gemma4",
    "openai_gptoss": "harmony",
}
"""Values of `model.reasoning_format`, by vLLM's parser."""
DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_DETECTED = "leave it out, and the format is detected in the chat template"
_FILES = "all files are of one checkpoint; for a revision of the hub, write ORG/NAME@REVISION"
_KERNELS = "kernels are chosen by measurement or by generate.attention"
_NO_COMPILER = "nothing is compiled by torch; CUDA graphs are captured if they work"
_NO_LOG = (
    "requests and their contents are not logged; /metrics and /admin/statistics have the figures"
)
_ONE_ENGINE = "replicas are in one engine: generate.replicas, and cluster.hosts for other hosts"
_DRAFTS = "set generate.drafting, and generate.draft_model for a draft model"
_PROXY = "terminate TLS in a proxy in front of vsched"

FLAGS: tuple[Flag, ...] = (
    # The model
    _set(
        "--model",
        "model.path",
        note="a folder, a GGUF file or a name on the hub; also as the argument PATH",
    ),
    _set(
        "--served-model-name",
        "model.name",
        to.one_name("model.name", "the model has one name; use it in all clients"),
        values=SEVERAL,
    ),
    _set(
        "--dtype",
        "model.dtype",
        to.choice("model.dtype", DTYPES, remedy="write auto, float32, bfloat16 or float16"),
    ),
    _set(
        "--max-model-len",
        "generate.context_tokens",
        to.count("generate.context_tokens", **{"-1": "0", "auto": "0"}),
    ),
    _set("--chat-template", "model.chat_template"),
    _ignored(
        "--enable-auto-tool-choice",
        "tool calls are always recognized if the chat template has tools",
        values=0,
    ),
    _set(
        "--tool-call-parser",
        "model.tool_format",
        to.choice("model.tool_format", TOOL_FORMATS, remedy=_DETECTED),
    ),
    _set(
        "--reasoning-parser",
        "model.reasoning_format",
        to.choice("model.reasoning_format", REASONING_FORMATS, remedy=_DETECTED),
    ),
    _set(
        "--generation-config",
        "model.sampling_defaults",
        to.choice(
            "model.sampling_defaults",
            {"auto": "true", "vllm": "false"},
            remedy="the defaults are in the checkpoint's generation_config.json",
        ),
    ),
    _ignored("--trust-remote-code", "code of checkpoints is never run", values=0),
    _ignored(
        "--seed",
        "each request has a seed, by default a random one, and the same seed repeats it",
    ),
    _ignored(
        "--quantization -q",
        "a quantized checkpoint is recognized by its config.json; generate.weights quantizes others",
        check=to.only(
            *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "auto"),
            remedy="set generate.weights to int8 or int4",
        ),
    ),
    _ignored(
        "--load-format",
        "weights are read from safetensors",
        check=to.only("auto", "safetensors", remedy="convert it, or see vsched make-checkpoint"),
    ),
    _ignored(
        "--runner --task",
        "vsched generates text",
        check=to.only("auto", "generate", remedy="only text generation is supported"),
    ),
    _ignored(
        "--model-impl --tokenizer-mode --config-format --chat-template-content-format",
        "derived from the checkpoint",
    ),
    _ignored("--hf-token --download-dir", "set HF_TOKEN and HF_HOME"),
    _refused(
        "--tokenizer --revision --code-revision --tokenizer-revision --hf-config-path", _FILES
    ),
    _refused(
        "--skip-tokenizer-init",
        "prompts are always tokenized by the checkpoint's tokenizer",
        values=0,
    ),
    _refused(
        "--hf-overrides --override-generation-config", "edit the JSON files of the checkpoint"
    ),
    _refused(
        "--logits-processors --tool-parser-plugin --reasoning-parser-plugin --io-processor-plugin",
        "vsched loads no plug-ins of vLLM",
    ),
    _refused("--default-chat-template-kwargs", "send chat_template_kwargs in requests"),
    # Images
    _set("--limit-mm-per-prompt", "media.images_max", to.image_limit, note="images only"),
    _set("--allowed-local-media-path", "media.directory"),
    _set("--allowed-media-domains", "media.hosts", to.json_list("media.hosts"), values=SEVERAL),
    _switch("--enable-mm-embeds", "media.allow_embeddings", off="false"),
    _switch("--language-model-only", "encode.replicas", "0", note="text only"),
    _set("--video-pruning-rate", "media.pruning.rate"),
    _set(
        "--video-pruning-method",
        "media.pruning.use",
        to.choice(
            "media.pruning.use",
            {"evs": "most-changed"},
            remedy="leave it out, or name a pruning policy in media.pruning.use",
        ),
        note="compares pixels instead of embeddings",
    ),
    _ignored("--mm-processor-cache-gb", "preprocessed images are cached in arena.pixel_bytes"),
    _ignored(
        "--mm-encoder-tp-mode --mm-processor-cache-type --mm-tensor-ipc",
        "images go to the encoder through shared memory; encode.tensor_parallel shards it",
    ),
    _ignored(
        "--skip-mm-profiling",
        "encode.reserved sets the memory of the encoder without measuring",
        values=0,
    ),
    _ignored(
        "--interleave-mm-strings",
        "images are always placed at their position in a message",
        values=0,
    ),
    _refused(
        "--mm-processor-kwargs --media-io-kwargs", "edit preprocessor_config.json of the checkpoint"
    ),
    _refused("--enable-prompt-embeds", "prompts are text, tokens and images", values=0),
    # Memory
    _set(
        "--gpu-memory-utilization --device-memory-utilization",
        "generate.memory.mem_fraction",
        note="the share of the memory that weights and activations leave free, not of the whole device",
    ),
    _set("--kv-cache-memory-bytes", "generate.memory.use generate.memory.bytes", to.pinned_bytes),
    _set("--block-size", "generate.block_size"),
    _switch("--enable-prefix-caching", "generate.prefix_cache", off="false", note="on by default"),
    _set(
        "--kv-cache-dtype",
        "generate.kv_dtype",
        to.choice(
            "generate.kv_dtype",
            {"auto": "auto", "int8": "int8", "int8_per_token_head": "int8"},
            remedy="leave it out, or set int8 on a CPU",
        ),
    ),
    _ignored(
        "--swap-space",
        "preempted requests are recomputed; generate.swap_memory and the policy swap-long swap them",
    ),
    _ignored("--prefix-caching-hash-algo", "blocks are always found by a cryptographic hash"),
    _refused("--num-gpu-blocks-override", 'set generate.memory = {use = "pinned", tokens = ...}'),
    _refused(
        "--cpu-offload-gb --offload-backend --offload-group-size",
        "weights are never offloaded; quantize them with generate.weights",
    ),
    _refused(
        "--kv-offloading-size --kv-offloading-backend",
        "set generate.swap_memory and the policy swap-long",
    ),
    _refused(
        "--kv-transfer-config --ec-transfer-config --kv-events-config",
        "KV caches are not shared between servers",
    ),
    _refused("--enable-sleep-mode", "stop the server to free its memory", values=0),
    # Scheduling
    _set("--max-num-seqs", "generate.slots"),
    _set(
        "--max-num-batched-tokens",
        "generate.max_batch_tokens",
        to.count("generate.max_batch_tokens"),
    ),
    _set("--long-prefill-token-threshold", "generate.chunk_tokens"),
    _set("--max-num-queued-reqs", "generate.max_waiting"),
    _set(
        "--scheduling-policy",
        "generate.admission.use",
        to.choice(
            "generate.admission.use",
            {"fcfs": "fifo", "priority": "priority"},
            remedy="choose a policy of generate.admission",
        ),
    ),
    Flag(
        names=("--enable-chunked-prefill",),
        outcome="no effect",
        note="prefill is always chunked; generate.chunk_tokens is the maximum size",
        values=0,
    ),
    _ignored(
        "--async-scheduling", "steps are always scheduled ahead if the device allows it", values=0
    ),
    _ignored("--stream-interval", "each token has an event; a slow client gets several in one"),
    _ignored(
        "--disable-hybrid-kv-cache-manager --disable-cascade-attn --disable-chunked-mm-input",
        "there is one KV cache manager, and images may be split across chunks",
        values=0,
    ),
    _refused("--speculative-config -sc --spec-method --spec-model --spec-tokens", _DRAFTS),
    _refused(
        "--scheduler-cls --max-num-partial-prefills --watermark",
        "choose or write a policy: docs/policies.md",
    ),
    # Processes and devices
    _set("--tensor-parallel-size -tp", "generate.tensor_parallel"),
    _set("--data-parallel-size -dp", "generate.replicas"),
    _set("--api-server-count -asc", "server.processes"),
    _set(
        "--device",
        "generate.device encode.device",
        to.device,
        note="`auto` by default: CUDA if it can be used, otherwise cpu",
    ),
    _ignored(
        "--pipeline-parallel-size -pp",
        "layers are not divided among ranks",
        check=to.only("1", remedy="raise --tensor-parallel-size instead"),
    ),
    _set(
        "--distributed-executor-backend",
        "cluster.ray",
        to.choice(
            "cluster.ray",
            {"mp": "", "uni": "", "ray": "auto"},
            remedy="ranks are processes of the server, of vsched host or of Ray",
        ),
        note="`ray` only",
    ),
    _ignored(
        "--nnodes -n --prefill-context-parallel-size -pcp --decode-context-parallel-size -dcp",
        "one node, no context parallelism",
        check=to.only(
            "1", remedy="start vsched host on other nodes and name them in cluster.hosts"
        ),
    ),
    _ignored(
        "--enforce-eager --disable-custom-all-reduce --enable-flashinfer-autotune",
        _NO_COMPILER,
        values=0,
    ),
    _ignored(
        "--compilation-config -cc -O --optimization-level --cudagraph-capture-sizes "
        "--max-cudagraph-capture-size --performance-mode",
        _NO_COMPILER,
    ),
    _ignored(
        "--attention-backend --attention-config --moe-backend --linear-backend "
        "--mamba-backend --kernel-config --mm-encoder-attn-backend",
        _KERNELS,
    ),
    _refused(
        "--enable-expert-parallel -ep --enable-eplb",
        "experts are divided by tensor parallelism at most",
        values=0,
    ),
    _refused(
        "--data-parallel-rank -dpn --data-parallel-start-rank -dpr "
        "--data-parallel-size-local -dpl --data-parallel-address -dpa "
        "--data-parallel-rpc-port -dpp --data-parallel-backend -dpb --node-rank -r "
        "--master-addr --master-port",
        _ONE_ENGINE,
    ),
    _refused(
        "--headless --data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe",
        _ONE_ENGINE,
        values=0,
    ),
    _refused(
        "--worker-cls --worker-extension-cls", "write a worker plug-in: docs/writing-a-worker.md"
    ),
    # Adapters
    _switch("--enable-lora", ADAPTERS, "1"),
    _set("--lora-modules", f"adapters.load {ADAPTERS}", to.adapters, values=SEVERAL),
    _set(
        "--max-loras --max-cpu-loras",
        ADAPTERS,
        note="all loaded adapters are in memory; the larger value counts",
    ),
    _set("--max-lora-rank", "adapters.rank_max"),
    _switch("--enable-tower-connector-lora", "adapters.encoder", off="false"),
    _ignored("--lora-dtype", "adapters have the type of the model"),
    _ignored("--fully-sharded-loras", "adapters are divided like the layers they change", values=0),
    # The server
    _set(
        "--api-key",
        "server.api_key_variable",
        to.api_key,
        values=SEVERAL,
        note="other users of the machine see it in the list of processes; a variable is safer",
    ),
    _set(
        "--allowed-origins",
        "server.cors_origins",
        to.json_list("server.cors_origins"),
        values=SEVERAL,
    ),
    _ignored(
        "--allowed-methods --allowed-headers",
        "pages of server.cors_origins may use GET, POST and any header",
    ),
    _ignored("--allow-credentials", "keys are sent in headers, not in cookies", values=0),
    _set("--root-path", "server.root_path"),
    _set(
        "--max-logprobs",
        "server.logprobs_max",
        to.count("server.logprobs_max", **{"-1": "10000000"}),
    ),
    _switch("--enable-force-include-usage", "server.usage_always", off="false"),
    _set("--shutdown-timeout", "deadlines.drain_s"),
    _set("--h11-max-incomplete-event-size", "server.header_bytes_max"),
    _set("--h11-max-header-count", "server.headers_max"),
    _ignored(
        "--response-role",
        "the role is assistant",
        check=to.only("assistant", remedy="leave it out"),
    ),
    _ignored(
        "--enable-prompt-tokens-details --enable-request-id-headers --enable-server-load-tracking",
        "usage has cached tokens, responses have X-Request-Id, /metrics has the load",
        values=0,
    ),
    _ignored(
        "--return-tokens-as-token-ids", "send return_tokens_as_token_ids in requests", values=0
    ),
    _ignored(
        "--disable-fastapi-docs",
        "/docs and /openapi.json are the same on every server and are always served",
        values=0,
    ),
    _switch("--enable-log-requests", "server.access_log", off="false", note="without contents"),
    _switch("--disable-uvicorn-access-log --disable-log-requests", "server.access_log", "false"),
    _ignored(
        "--disable-log-stats --enable-log-outputs --aggregate-engine-logging", _NO_LOG, values=0
    ),
    _ignored("--max-log-len --kv-cache-metrics-sample", _NO_LOG),
    _ignored("--uvicorn-log-level", "--log-level is for all of vsched"),
    _ignored(
        "--structured-outputs-config --guided-decoding-backend",
        "llguidance checks and applies all grammars",
    ),
    _refused("--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers", _PROXY),
    _refused("--enable-ssl-refresh", _PROXY, values=0),
    _refused("--uds --grpc-port", "vsched listens on server.host and server.port"),
    _refused("--grpc", "vsched speaks HTTP", values=0),
    _refused("--middleware", "put a proxy in front of vsched"),
    _set("--otlp-traces-endpoint", "server.otlp_endpoint", note="OTLP over HTTP"),
    _refused("--collect-detailed-traces", "record the server (record.path) and see vsched replay"),
    _refused("--tool-server", "tools are called by the client"),
    _refused("--enable-tokenizer-info-endpoint", "/tokenize and /detokenize are served", values=0),
)
"""All flags, in the order of the documentation."""


def flags_table() -> str:
    """The table in Markdown."""
    lines = ["| flag of vLLM | vsched |", "|---|---|"]
    for flag in FLAGS:
        names = ", ".join(f"`{name}`" for name in flag.names)
        if flag.outcome == "set":
            words = [", ".join(f"`{key}`" for key in flag.keys), flag.note]
            outcome = "; ".join(word for word in words if word)
        else:
            outcome = f"{flag.outcome}: {flag.note}"
        lines.append(f"| {names} | {outcome} |")
    return "\n".join(lines) + "\n"
