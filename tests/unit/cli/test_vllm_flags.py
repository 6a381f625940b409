"""vLLM's flags on the command line of `vsched serve`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.each_case import each_case
from vsched.cli.vllm_flags import (
    BY_NAME,
    DTYPES,
    FLAGS,
    REASONING_FORMATS,
    TOOL_FORMATS,
    Flag,
    flags_table,
    translate,
)
from vsched.config import Config, load_config
from vsched.config.sections import config_keys
from vsched.errors import ConfigError

ROOT = Path(__file__).parents[3]
SAMPLES = {
    "--allowed-origins": '["https://app.example.com"]',
    "--distributed-executor-backend": "ray",
    "--generation-config": "vllm",
    "--limit-mm-per-prompt": '{"image": 4, "video": 1}',
    "--lora-modules": "sql=/adapters/sql",
    "--scheduling-policy": "priority",
    "--tool-call-parser": "hermes",
    "--video-pruning-method": "evs",
    "--video-pruning-rate": "0.5",
    "--otlp-traces-endpoint": "http://collector:4318/v1/traces",
    "--reasoning-parser": "qwen3",
    "--dtype": "half",
    "--device": "cuda",
    "--chat-template": "template.jinja",
    "--gpu-memory-utilization": "0.5",
    "--kv-cache-dtype": "int8",
    "--kv-cache-memory-bytes": "2G",
    "--root-path": "/llm",
    "--max-num-batched-tokens": "2k",
    "--h11-max-incomplete-event-size": "4096",
}


def sets(*words: str) -> list[str]:
    """Assignments of a translated command line that has nothing else."""
    translated = translate(words).words
    assert translated[::2] == ["--set"] * (len(translated) // 2), translated
    return translated[1::2]


def configured(*words: str) -> Config:
    """Configuration in force after a translated command line."""
    return load_config(None, sets=sets(*words), environ={}).config


def test_vllm_line_of_a_deployment_configures_vsched() -> None:
    config = configured(
        *("--tensor-parallel-size", "2", "--max_model_len=8k", "--served-model-name", "qwen"),
        *("--dtype", "half", "--max-num-seqs", "32", "--max-num-batched-tokens", "4096"),
        *("--gpu-memory-utilization", ".9", "--no-enable-prefix-caching", "--block-size", "32"),
        *("--limit-mm-per-prompt", '{"image": 4, "video": 0}', "--tool-call-parser", "hermes"),
        *("--enable-auto-tool-choice", "--trust-remote-code", "--seed", "0", "-dp", "2"),
    )
    assert config.model.name == "qwen"
    assert config.model.dtype == "float16"
    assert config.model.tool_format == "hermes"
    assert config.media.images_max == 4
    generate = config.generate
    assert (generate.tensor_parallel, generate.replicas, generate.slots) == (2, 2, 32)
    assert (generate.context_tokens, generate.max_batch_tokens) == (8000, 4096)
    assert (generate.block_size, generate.prefix_cache) == (32, False)
    assert generate.memory == {"use": "auto-profile", "mem_fraction": 0.9}


@each_case("flag", [one for one in FLAGS if one.outcome == "sets"])
def test_vllm_flag_sets_the_keys_that_the_table_names(flag: Flag) -> None:
    name = flag.names[0]
    words = [name, SAMPLES.get(name, "2")] if flag.values else [name]
    found = {one.partition("=")[0] for one in sets(*words)}
    assert found == set(flag.keys)
    for key in flag.keys:
        assert key in config_keys() or key.rpartition(".")[0] in config_keys()
    configured(*words)


def test_vllm_flags_are_named_once() -> None:
    """On the page as well."""
    assert len(BY_NAME) == sum(len(flag.names) for flag in FLAGS)
    assert all(flag.note for flag in FLAGS if flag.outcome != "sets")
    text = (ROOT / "docs/reference/vllm-flags.md").read_text()
    assert flags_table() in text, "put the table of `vsched config vllm-flags` into the page"


def test_vllm_names_of_formats_are_values_of_their_keys() -> None:
    for parser in TOOL_FORMATS:
        configured("--tool-call-parser", parser)
    for parser in REASONING_FORMATS:
        configured("--reasoning-parser", parser)
    for name in DTYPES:
        configured("--dtype", name)


def test_vllm_flag_without_effect_reports_why() -> None:
    done = translate(["--trust-remote-code", "folder", "--seed", "-1", "--no-enable-sleep-mode"])
    assert done.words == ["folder"]
    assert done.notes == [
        "--trust-remote-code of vLLM has no effect: code of checkpoints is never run",
        "--seed of vLLM has no effect: each request has a seed, by default a random one, and the same seed repeats it",
        "--no-enable-sleep-mode of vLLM has no effect: it is always off",
    ]


def test_vllm_flags_that_are_refused_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        translate(["--ssl-keyfile", "key.pem", "--grpc", "-pp", "2", "--uds", "socket"])
    assert str(caught.value).splitlines() == [
        "--ssl-keyfile of vLLM has no counterpart: terminate TLS in a proxy in front of vsched",
        "--grpc of vLLM has no counterpart: vsched speaks HTTP",
        "-pp of vLLM has no counterpart for 2: raise --tensor-parallel-size instead",
        "--uds of vLLM has no counterpart: vsched listens on server.host and server.port",
    ]


@each_case(
    ("words", "message"),
    [
        (["--max-model-len", "long"], "needs a number such as 8192, 32k or 32K, not 'long'"),
        (["--max-model-len"], "needs a value"),
        (["--served-model-name", "a", "b"], "has 2 values"),
        (["--lora-modules", "sql"], "needs name=path, not 'sql'"),
        (["--limit-mm-per-prompt", "{image"], "needs JSON"),
        (["--limit-mm-per-prompt.audio", "1"], "has no counterpart for audio"),
        (["--limit-mm-per-prompt", "image=0,video=1"], "has no counterpart for videos without"),
        (["--max-loras", "many"], "needs a number such as 8192, 32k or 32K, not 'many'"),
        (["--enable-prefix-caching=false"], "takes no value, not 'false': .* --no-enable-prefix"),
        (["--api-key", "one", "two"], "has 2 keys"),
    ],
)
def test_vllm_value_that_is_wrong_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"of vLLM {message}"):
        translate(words)


def test_vllm_adapters_are_counted_over_all_flags() -> None:
    words = ["--enable-lora", "--lora-modules", "a=/a", '{"name": "b", "path": "/b"}']
    config = configured(*words, "--max-loras", "1", "--max-lora-rank", "32")
    assert config.adapters.load == {"a": "/a", "b": "/b"}
    assert (config.adapters.count_max, config.adapters.rank_max) == (2, 32)


@each_case(
    ("words", "images", "videos"),
    [
        (["--limit-mm-per-prompt", "image=3,video=0"], 3, 0),
        (["--limit-mm-per-prompt", '{"image": {"count": 3, "width": 9}}'], 3, None),
        (["--limit-mm-per-prompt.image", "3"], 3, None),
        (["--limit-mm-per-prompt.image=3"], 3, None),
        (["--limit-mm-per-prompt.video", "2"], None, 2),
    ],
)
def test_vllm_image_limit_is_read_in_all_its_forms(
    words: list[str], images: int | None, videos: int | None
) -> None:
    default, media = Config().media, configured(*words).media
    assert media.images_max == (default.images_max if images is None else images)
    assert media.videos_max == (default.videos_max if videos is None else videos)


def test_vllm_flags_leave_options_of_vsched_alone() -> None:
    """An explicit key takes precedence: it comes later. A level may be attached to its flag."""
    words = ["folder", "--set", "generate.slots=2", "--max-num-seqs", "3", "--host", "::"]
    done = translate(words)
    assert done.words == ["--set", "generate.slots=3", *words[:3], *words[5:]]
    assert translate(["--", "--max-num-seqs"]).words == ["--", "--max-num-seqs"]
    own = {"--config", "-c", "--set", "--host", "--port", "--record", "--resume", "--ray"}
    assert not own & BY_NAME.keys()
    for level in ("-O3", "-O.mode=3"):
        assert translate([level, "folder"]).words == ["folder"]


def test_vllm_api_key_goes_into_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSCHED_API_KEY", "")
    done = translate(["--api-key", "secret", "--port", "1"])
    assert done.words == ["--set", "server.api_key_variable=VSCHED_API_KEY", "--port", "1"]
    assert done.environment == {"VSCHED_API_KEY": "secret"}
    assert "secret" not in "".join(done.notes)
    assert os.environ["VSCHED_API_KEY"] == ""
