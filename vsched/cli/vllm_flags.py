"""Flags of `vllm serve`, translated to options of `vsched serve`.

The names are those of vLLM 0.11 to 0.33. `docs/reference/vllm-flags.md` is generated from the table by
`vsched config vllm-flags`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, cast

import msgspec
from typer.core import TyperCommand

from vsched.errors import ConfigError, ConfigProblems

NOTES = "vsched.vllm.notes"
"""Key of the notes in the `meta` of the command's context."""
API_KEY_VARIABLE = "VSCHED_API_KEY"
ADAPTERS = "adapters.count_max"
SEVERAL = -1
Outcome = Literal["sets", "no effect", "refused"]
Assignments = dict[str, str]
Convert = Callable[[Sequence[str]], Assignments]
"""Converts the words after a flag; raises `ConfigError` with the end of a sentence that starts with the flag."""

_TABLE = """
# The model
--model sets model.path: a folder, a GGUF file or a name on the hub; also as the argument PATH
--served-model-name * sets model.name
--dtype sets model.dtype
--max-model-len sets generate.context_tokens
--chat-template sets model.chat_template
--enable-auto-tool-choice 0 no effect: tool calls are always recognized if the chat template has tools
--tool-call-parser sets model.tool_format
--reasoning-parser sets model.reasoning_format
--generation-config sets model.sampling_defaults
--trust-remote-code 0 no effect: code of checkpoints is never run
--seed no effect: each request has a seed, by default a random one, and the same seed repeats it
--quantization -q no effect: a quantized checkpoint is recognized by its config.json; generate.weights quantizes
    others
--load-format no effect: weights are read from safetensors; other formats are refused
--runner --task no effect: vsched generates text; other tasks are refused
--model-impl --tokenizer-mode --config-format --chat-template-content-format no effect: derived from the checkpoint
--hf-token --download-dir no effect: set HF_TOKEN and HF_HOME
--tokenizer --revision --code-revision --tokenizer-revision --hf-config-path refused: all files are of one checkpoint;
    for a revision of the hub, write ORG/NAME@REVISION
--skip-tokenizer-init 0 refused: prompts are always tokenized by the checkpoint's tokenizer
--hf-overrides --override-generation-config refused: edit the JSON files of the checkpoint
--logits-processors --tool-parser-plugin --reasoning-parser-plugin --io-processor-plugin refused: vsched loads no
    plug-ins of vLLM
--default-chat-template-kwargs refused: send chat_template_kwargs in requests
# Images
--limit-mm-per-prompt sets media.images_max media.videos_max: a video counts as an image, too
--allowed-local-media-path sets media.directory
--allowed-media-domains * sets media.hosts
--enable-mm-embeds 0 sets media.allow_embeddings=true/false
--language-model-only 0 sets encode.replicas=0: text only
--video-pruning-rate sets media.pruning.rate
--video-pruning-method sets media.pruning.use: compares pixels instead of embeddings
--mm-processor-cache-gb no effect: preprocessed images are cached in arena.pixel_bytes
--mm-encoder-tp-mode --mm-processor-cache-type --mm-tensor-ipc no effect: images go to the encoder through shared
    memory; encode.tensor_parallel shards it
--skip-mm-profiling 0 no effect: encode.reserved sets the memory of the encoder without measuring
--interleave-mm-strings 0 no effect: images are always placed at their position in a message
--mm-processor-kwargs --media-io-kwargs refused: edit preprocessor_config.json of the checkpoint
--enable-prompt-embeds 0 refused: prompts are text, tokens and images
# Memory
--gpu-memory-utilization --device-memory-utilization sets generate.memory.mem_fraction: the share of the memory that
    weights and activations leave free, not of the whole device
--kv-cache-memory-bytes sets generate.memory.use generate.memory.bytes
--block-size sets generate.block_size
--enable-prefix-caching 0 sets generate.prefix_cache=true/false: on by default
--kv-cache-dtype sets generate.kv_dtype
--swap-space no effect: preempted requests are recomputed; generate.swap_memory and the policy swap-long swap them
--prefix-caching-hash-algo no effect: blocks are always found by a cryptographic hash
--num-gpu-blocks-override refused: set generate.memory = {use = "pinned", tokens = ...}
--cpu-offload-gb --offload-backend --offload-group-size refused: weights are never offloaded; quantize them with
    generate.weights
--kv-offloading-size --kv-offloading-backend refused: set generate.swap_memory and the policy swap-long
--kv-transfer-config --ec-transfer-config --kv-events-config refused: KV caches are not shared between servers
--enable-sleep-mode 0 refused: stop the server to free its memory
# Scheduling
--max-num-seqs sets generate.slots
--max-num-batched-tokens sets generate.max_batch_tokens
--long-prefill-token-threshold sets generate.chunk_tokens
--max-num-queued-reqs sets generate.max_waiting
--scheduling-policy sets generate.admission.use
--enable-chunked-prefill 0 no effect: prefill is always chunked; generate.chunk_tokens is the maximum size
--async-scheduling 0 no effect: steps are always scheduled ahead if the device allows it
--stream-interval no effect: each token has an event; a slow client gets several in one
--disable-hybrid-kv-cache-manager --disable-cascade-attn --disable-chunked-mm-input 0 no effect: there is one KV cache
    manager, and images may be split across chunks
--speculative-config -sc --spec-method --spec-model --spec-tokens refused: set generate.drafting, and
    generate.draft_model for a draft model
--scheduler-cls --max-num-partial-prefills --watermark refused: choose or write a policy: docs/policies.md
# Processes and devices
--tensor-parallel-size -tp sets generate.tensor_parallel
--data-parallel-size -dp sets generate.replicas
--api-server-count -asc sets server.processes
--device sets generate.device encode.device: `auto` by default: CUDA if it can be used, otherwise cpu
--pipeline-parallel-size -pp no effect: layers are not divided among ranks; above 1 is refused
--distributed-executor-backend sets cluster.ray: `ray` only
--nnodes -n --prefill-context-parallel-size -pcp --decode-context-parallel-size -dcp no effect: one node, no context
    parallelism
--enforce-eager --disable-custom-all-reduce --enable-flashinfer-autotune 0 no effect: nothing is compiled by torch;
    CUDA graphs are captured if they work
--compilation-config -cc -O --optimization-level --cudagraph-capture-sizes --max-cudagraph-capture-size
    --performance-mode no effect: nothing is compiled by torch; CUDA graphs are captured if they work
-O0 -O1 -O2 -O3 0 no effect: nothing is compiled by torch; CUDA graphs are captured if they work
--attention-backend --attention-config --moe-backend --linear-backend --mamba-backend --kernel-config
    --mm-encoder-attn-backend no effect: kernels are chosen by measurement or by generate.attention
--enable-expert-parallel -ep --enable-eplb 0 refused: experts are divided by tensor parallelism at most
--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-size-local -dpl --data-parallel-address -dpa
    --data-parallel-rpc-port -dpp --data-parallel-backend -dpb --node-rank -r --master-addr --master-port refused:
    replicas are in one engine: generate.replicas, and cluster.hosts for other hosts
--headless --data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe 0 refused: replicas are in one engine:
    generate.replicas, and cluster.hosts for other hosts
--worker-cls --worker-extension-cls refused: write a worker plug-in: docs/writing-a-worker.md
# Adapters
--enable-lora 0 sets adapters.count_max=1
--lora-modules * sets adapters.load adapters.count_max
--max-loras --max-cpu-loras sets adapters.count_max: all loaded adapters are in memory; the larger value counts
--max-lora-rank sets adapters.rank_max
--enable-tower-connector-lora 0 sets adapters.encoder=true/false
--lora-dtype no effect: adapters have the type of the model
--fully-sharded-loras 0 no effect: adapters are divided like the layers they change
# The server
--api-key * sets server.api_key_variable: other users of the machine see it in the list of processes; a variable is
    safer
--allowed-origins * sets server.cors_origins
--allowed-methods --allowed-headers no effect: pages of server.cors_origins may use GET, POST and any header
--allow-credentials 0 no effect: keys are sent in headers, not in cookies
--root-path sets server.root_path
--max-logprobs sets server.logprobs_max
--enable-force-include-usage 0 sets server.usage_always=true/false
--shutdown-timeout sets deadlines.drain_s
--h11-max-incomplete-event-size sets server.header_bytes_max
--h11-max-header-count sets server.headers_max
--response-role no effect: the role is assistant
--enable-prompt-tokens-details --enable-request-id-headers --enable-server-load-tracking 0 no effect: usage has cached
    tokens, responses have X-Request-Id, /metrics has the load
--return-tokens-as-token-ids 0 no effect: send return_tokens_as_token_ids in requests
--disable-fastapi-docs 0 no effect: /openapi.json is the same on every server and is always served
--enable-log-requests 0 sets server.access_log=true/false: without contents
--disable-uvicorn-access-log --disable-log-requests 0 sets server.access_log=false
--disable-log-stats --enable-log-outputs --aggregate-engine-logging 0 no effect: requests and their contents are not
    logged; /metrics and /admin/statistics have the figures
--max-log-len --kv-cache-metrics-sample no effect: requests and their contents are not logged; /metrics and
    /admin/statistics have the figures
--uvicorn-log-level no effect: --log-level is for all of vsched
--structured-outputs-config --guided-decoding-backend no effect: llguidance checks and applies all grammars
--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers refused: terminate TLS in a proxy in front
    of vsched
--enable-ssl-refresh 0 refused: terminate TLS in a proxy in front of vsched
--uds --grpc-port refused: vsched listens on server.host and server.port
--grpc 0 refused: vsched speaks HTTP
--middleware refused: put a proxy in front of vsched
--otlp-traces-endpoint sets server.otlp_endpoint: OTLP over HTTP
--collect-detailed-traces refused: record the server (record.path) and see vsched replay
--tool-server refused: tools are called by the client
--enable-tokenizer-info-endpoint 0 refused: /tokenize and /detokenize are served
"""
"""All flags, in the order of the documentation; more than one name if the outcome is the same.

After the names, `*` stands for several values, and `0` for a switch, which also has a `--no-` form. A switch sets
`key=value`, or `key=value/value` if the `--no-` form sets another one. The text after the colon is the reason, the
remedy, or the difference from vLLM.
"""


def _names(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


TOOL_FORMATS = _names(
    "hermes=hermes deepseek_v3=deepseek deepseek_v31=deepseek-v3.1 mistral=auto llama3_json=llama-json "
    "llama4_json=llama-json pythonic=pythonic llama4_pythonic=pythonic qwen3_coder=qwen3-coder "
    "qwen3_xml=qwen3-coder glm45=glm glm47=glm minimax_m2=minimax gemma4=gemma4 openai=harmony"
)
"""Values of `model.tool_format`, by vLLM's parser."""
REASONING_FORMATS = _names(
    "deepseek_r1=think deepseek_v3=think qwen3=think glm45=think mistral=mistral gemma4=gemma4 openai_gptoss=harmony"
)
"""Values of `model.reasoning_format`, by vLLM's parser."""
DTYPES = _names(
    "auto=auto half=float16 float16=float16 bfloat16=bfloat16 float=float32 float32=float32"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWERS = "kmgt"


def assign(keys: str, value: str = "") -> Convert:
    """A value for each of the keys, by default the word after the flag."""
    return lambda words: dict.fromkeys(keys.split(), value or words[0])


def count(key: str, **special: str) -> Convert:
    """A number, also as `32k` (1,000s) or `32K` (1,024s); `special` maps words to values."""

    def convert(words: Sequence[str]) -> Assignments:
        word = words[0]
        return {key: special[word] if word in special else str(size(word))}

    return convert


def size(word: str) -> int:
    """Number that a word such as 8192, 32k or 1.5m stands for.

    Raises:
        ConfigError: For other words.
    """
    match = _SIZE.fullmatch(word)
    if match is None:
        raise ConfigError(f"needs a number such as 8192, 32k or 32K, not {word!r}")
    number, suffix = match.groups()
    base = 1024 if suffix.isupper() else 1000
    power = _POWERS.index(suffix.lower()) + 1 if suffix else 0
    return int(float(number) * base**power) if "." in number else int(number) * base**power


def choice(key: str, values: Mapping[str, str], remedy: str) -> Convert:
    """One of vLLM's names; an empty string leaves the key alone.

    `remedy` ends the error for all other names.
    """

    def convert(words: Sequence[str]) -> Assignments:
        if words[0] not in values:
            raise ConfigError(f"has no counterpart for {words[0]}: {remedy}")
        value = values[words[0]]
        return {key: value} if value else {}

    return convert


def only(accepted: str, remedy: str) -> Convert:
    """A value that must be one of these words and sets nothing."""
    return choice("", dict.fromkeys(accepted.split(), ""), remedy)


def one_name(key: str, remedy: str) -> Convert:
    """A single value of a flag that takes several."""

    def convert(words: Sequence[str]) -> Assignments:
        if len(words) != 1:
            raise ConfigError(f"has {len(words)} values: {remedy}")
        return {key: words[0]}

    return convert


def json_list(key: str) -> Convert:
    """Several words, or one JSON array."""

    def convert(words: Sequence[str]) -> Assignments:
        if len(words) == 1 and words[0].startswith("["):
            return {key: to_toml(read_json(words[0]))}
        return {key: to_toml([one for word in words for one in word.split(",")])}

    return convert


def media_limits(words: Sequence[str]) -> Assignments:
    """Limits of images and videos from `{"image": 4}`, `{"image": {"count": 4}}` or `image=4,video=0`."""
    word = words[0]
    limits = (
        read_json(word)
        if word.startswith("{")
        else dict(part.partition("=")[::2] for part in word.split(","))
    )
    counts = {
        kind: size(str(limit.get("count", 999) if isinstance(limit, dict) else limit))
        for kind, limit in limits.items()
    }
    assignments: Assignments = {}
    for kind, number in counts.items():
        if kind in ("image", "video"):
            assignments[f"media.{kind}s_max"] = str(number)
        elif number:
            raise ConfigError(
                f"has no counterpart for {kind}: only images and videos are supported; set it 0"
            )
    if counts.get("image") == 0 and counts.get("video"):
        raise ConfigError(
            "has no counterpart for videos without images: media.images_max counts videos, too; "
            'leave "image" out'
        )
    return assignments


def adapters(words: Sequence[str]) -> Assignments:
    """Adapters to load, `name=path` or JSON objects with `name` and `path`."""
    load = {}
    for word in words:
        if word.startswith("{"):
            entry = read_json(word)
            name, path = entry.get("name", ""), entry.get("path", "")
        else:
            name, _, path = word.partition("=")
        if not name or not path:
            raise ConfigError(f"needs name=path, not {word!r}")
        load[name] = path
    table = ", ".join(f"{to_toml(name)} = {to_toml(path)}" for name, path in load.items())
    return {"adapters.load": f"{{{table}}}", ADAPTERS: str(len(load))}


def api_key(words: Sequence[str]) -> Assignments:
    """The name of the variable; the caller puts the key into it."""
    if len(words) != 1:
        raise ConfigError(
            f"has {len(words)} keys: the API key is one; give tenants their own with "
            "server.tenant_keys_variable"
        )
    return {"server.api_key_variable": API_KEY_VARIABLE}


def to_toml(value: Any) -> str:
    """Format a string or a list of strings as TOML; JSON's form is valid TOML."""
    return json.dumps(value, ensure_ascii=False)


def read_json(word: str) -> Any:
    """Parse JSON.

    Raises:
        ConfigError: If it is not valid.
    """
    try:
        return json.loads(word)
    except ValueError as error:
        raise ConfigError(f"needs JSON: {error}") from None


_DETECTED = "leave it out, and the format is detected in the chat template"
_CONVERT: dict[str, Convert] = {
    "--served-model-name": one_name("model.name", "the model has one name; use it in all clients"),
    "--dtype": choice("model.dtype", DTYPES, "write auto, float32, bfloat16 or float16"),
    "--max-model-len": count("generate.context_tokens", **{"-1": "0", "auto": "0"}),
    "--tool-call-parser": choice("model.tool_format", TOOL_FORMATS, _DETECTED),
    "--reasoning-parser": choice("model.reasoning_format", REASONING_FORMATS, _DETECTED),
    "--generation-config": choice(
        "model.sampling_defaults",
        _names("auto=true vllm=false"),
        "the defaults are in the checkpoint's generation_config.json",
    ),
    "--quantization": only(
        "awq awq_marlin gptq gptq_marlin compressed-tensors auto",
        "set generate.weights to int8 or int4",
    ),
    "--load-format": only("auto safetensors", "convert it, or see vsched make-checkpoint"),
    "--runner": only("auto generate", "only text generation is supported"),
    "--limit-mm-per-prompt": media_limits,
    "--allowed-media-domains": json_list("media.hosts"),
    "--video-pruning-method": choice(
        "media.pruning.use",
        {"evs": "most-changed"},
        "leave it out, or name a pruning policy in media.pruning.use",
    ),
    "--kv-cache-memory-bytes": lambda words: {
        "generate.memory.use": "pinned",
        "generate.memory.bytes": str(size(words[0])),
    },
    "--kv-cache-dtype": choice(
        "generate.kv_dtype",
        _names("auto=auto int8=int8 int8_per_token_head=int8"),
        "leave it out, or set int8 on a CPU",
    ),
    "--gpu-memory-utilization": lambda words: {
        "generate.memory.mem_fraction": re.sub(r"^\.", "0.", words[0])  # .9 is no number in TOML
    },
    "--max-num-batched-tokens": count("generate.max_batch_tokens"),
    "--scheduling-policy": choice(
        "generate.admission.use",
        {"fcfs": "fifo", "priority": "priority"},
        "choose a policy of generate.admission",
    ),
    "--pipeline-parallel-size": only("1", "raise --tensor-parallel-size instead"),
    "--distributed-executor-backend": choice(
        "cluster.ray",
        {"mp": "", "uni": "", "ray": "auto"},
        "ranks are processes of the server, of vsched host or of Ray",
    ),
    "--nnodes": only("1", "start vsched host on other nodes and name them in cluster.hosts"),
    "--lora-modules": adapters,
    "--max-loras": count(ADAPTERS),
    "--api-key": api_key,
    "--allowed-origins": json_list("server.cors_origins"),
    "--max-logprobs": count("server.logprobs_max", **{"-1": "10000000"}),
    "--response-role": only("assistant", "leave it out"),
}
"""Conversions by the first name of a flag; without one, a flag sets its key to its value."""


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """A flag, or several with one outcome.

    Attributes:
        keys: The keys that it sets, for the documentation.
        values: Number of words after the flag; 0 for a switch, which also has a `--no-` form.
        convert: Assignments for the words; for a flag without effect, a check of them.
        convert_no: Assignments of the `--no-` form, None if it has no effect.
    """

    names: tuple[str, ...]
    outcome: Outcome
    keys: tuple[str, ...] = ()
    note: str = ""
    values: int = 1
    convert: Convert | None = None
    convert_no: Convert | None = None


_LINE = re.compile(
    r"(?P<names>-\S+(?: -\S+)*)(?: (?P<count>[*0]))? (?P<outcome>sets|no effect|refused)"
    r"(?: (?P<keys>[^:]+))?(?:: (?P<note>.*))?"
)


def _read_flags(table: str) -> Iterator[Flag]:
    for line in re.sub(r"\n +", " ", table.strip()).splitlines():
        if line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        assert found is not None, line
        names, (keys, _, values) = found["names"].split(), (found["keys"] or "").partition("=")
        convert, convert_no = _CONVERT.get(names[0]), None
        if values:
            on, _, off = values.partition("/")
            convert, convert_no = assign(keys, on), assign(keys, off) if off else None
        elif keys and convert is None:
            convert = assign(keys)
        yield Flag(
            names=tuple(names),
            outcome=cast("Outcome", found["outcome"]),
            keys=tuple(keys.split()),
            note=found["note"] or "",
            values={"*": SEVERAL, "0": 0}.get(found["count"], 1),
            convert=convert,
            convert_no=convert_no,
        )


FLAGS = tuple(_read_flags(_TABLE))
BY_NAME = {name: flag for flag in FLAGS for name in flag.names}


def flags_table() -> str:
    """The table in Markdown."""
    lines = ["| flag of vLLM | vsched |", "|---|---|"]
    for flag in FLAGS:
        names = ", ".join(f"`{name}`" for name in flag.names)
        outcome = f"{flag.outcome}: {flag.note}"
        if flag.keys:
            words = [", ".join(f"`{key}`" for key in flag.keys), flag.note]
            outcome = "; ".join(word for word in words if word)
        lines.append(f"| {names} | {outcome} |")
    return "\n".join(lines) + "\n"


class Translation(msgspec.Struct, kw_only=True):
    """A translated command line.

    Attributes:
        words: Arguments of `vsched serve`.
        environment: Variables to set.
        notes: A line for each flag without effect or with another meaning.
    """

    words: list[str]
    environment: dict[str, str]
    notes: list[str]


def translate(words: Sequence[str]) -> Translation:
    """Replace vLLM's flags by assignments (`--set`), which come first: options of vsched take precedence.

    Raises:
        ConfigError: With a line for each flag that is refused.
    """
    problems = ConfigProblems()
    assignments: Assignments = {}
    done = Translation(words=[], environment={}, notes=[])
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            done.words += [word, *rest]
            break
        found = _find(word)
        if found is None:
            done.words.append(word)
            continue
        name, flag, negated, values = found
        values += _values(rest, flag.values if not values and not negated else 0)
        with problems.collected():
            new = _apply(name, flag, negated, values, done)
            if ADAPTERS in new:
                new[ADAPTERS] = str(max(int(new[ADAPTERS]), int(assignments.get(ADAPTERS, 0))))
            assignments |= new
    problems.raise_all()
    sets = [part for key, value in assignments.items() for part in ("--set", f"{key}={value}")]
    done.words[:0] = sets
    return done


def _find(word: str) -> tuple[str, Flag, bool, list[str]] | None:
    """Parse a flag: its name as written, its entry, whether it is negated, and the value after `=`."""
    if not word.startswith("-"):
        return None
    name, equals, value = word.partition("=")
    name = name.replace("_", "-") if name.startswith("--") else name
    name, dot, field = name.partition(".")
    negated = name.startswith("--no-") and name not in BY_NAME
    flag = BY_NAME.get(f"--{name.removeprefix('--no-')}" if negated else name)
    if flag is None or (negated and flag.values):
        return None
    return name + dot + field, flag, negated, [value] if equals else []


def _values(rest: list[str], count: int) -> list[str]:
    """Remove the values of a flag from the front of the remaining words."""
    if count != SEVERAL:
        found, rest[:count] = rest[:count], []
        return found
    found = []
    while rest and not rest[0].startswith("-"):
        found.append(rest.pop(0))
    return found


def _apply(
    name: str, flag: Flag, negated: bool, values: list[str], done: Translation
) -> Assignments:
    """Return the assignments of a flag, and add its notes and variables."""
    name, dot, field = name.partition(".")
    if dot and values:  # --limit-mm-per-prompt.image 4
        values = [json.dumps({field: _json_or_text(values[0])})]
    if flag.outcome == "refused" and not negated:
        raise ConfigError(f"{name} of vLLM has no counterpart: {flag.note}")
    if flag.values and not values:
        raise ConfigError(f"{name} of vLLM needs a value")
    if values and not flag.values:
        first = flag.names[0]
        raise ConfigError(
            f"{name} of vLLM takes no value, not {values[0]!r}: write {first}, or --no-{first[2:]} for off"
        )
    convert = flag.convert_no if negated else flag.convert
    assignments: Assignments = {}
    if convert is not None:
        try:
            assignments = dict(convert(values))
        except ConfigError as error:
            raise ConfigError(f"{name} of vLLM {error}") from None
    done.notes += _notes(name, flag, negated, assignments)
    if assignments.get("server.api_key_variable") == API_KEY_VARIABLE:
        done.environment[API_KEY_VARIABLE] = values[0]
    return assignments


def _notes(name: str, flag: Flag, negated: bool, assignments: Assignments) -> Iterator[str]:
    if flag.outcome == "refused":
        yield f"{name} of vLLM has no effect: it is always off"
    elif not assignments:
        yield f"{name} of vLLM has no effect: {flag.note or 'it is the default'}"
    elif flag.note and not negated:
        yield f"{name} of vLLM sets {', '.join(assignments)}: {flag.note}"


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class ServeCommand(TyperCommand):
    """`vsched serve`: flags of vLLM are translated before the command line is parsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate and parse; the notes are for the command to log."""
        if ctx.resilient_parsing:  # shell completion
            return super().parse_args(ctx, args)
        done = translate(args)
        if "VLLM_API_KEY" in os.environ and not done.environment:
            done.notes.append(
                "VLLM_API_KEY has no effect: set VSCHED__SERVER__API_KEY_VARIABLE=VLLM_API_KEY to ask clients for it"
            )
        os.environ.update(done.environment)
        ctx.meta[NOTES] = done.notes
        return super().parse_args(ctx, done.words)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete flags of vLLM, too."""
        names = [name for name in BY_NAME if name.startswith(incomplete or " ")]
        items = [SimpleNamespace(value=name, type="plain", help="as in vLLM") for name in names]
        return [*super().shell_complete(ctx, incomplete), *items]
