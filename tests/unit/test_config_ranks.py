"""Several ranks in a configuration: shares of caps and cores, and impossible combinations."""

from __future__ import annotations

import pytest

from tests.machines import pretend_cores
from tests.unit.test_config import refusal
from vsched.config import Config, EncodeConfig, load_config, resolve_policies


@pytest.mark.parametrize(("items", "replicas", "each"), [(8, 2, 4), (1, 2, 1), (8, 1, 8)])
def test_config_replicas_share_the_batch_cap(items: int, replicas: int, each: int) -> None:
    """`max(batch // replicas, 1)`, as the policies are resolved."""
    admission = {"use": "token-budget", "max_items": items}
    encode = EncodeConfig(replicas=replicas, admission=admission)
    assert resolve_policies(Config(encode=encode)).encode_items_max == each


@pytest.mark.parametrize(
    ("sets", "cores", "threads"),
    [
        ([], 16, (8, 8)),
        (["generate.replicas=2", "generate.tensor_parallel=3"], 16, (2, 2)),
        (["generate.threads=5"], 16, (8, 5)),
        (["encode.replicas=2", "generate.replicas=2"], 2, (1, 1)),
        (["placement=together"], 2, (2, 2)),
    ],
)
def test_config_threads_default_to_the_share_of_a_rank(
    sets: list[str], cores: int, threads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that start in parallel do not take each other's cores."""
    pretend_cores(monkeypatch, cores)
    config = load_config(None, sets=sets, environ={}).config
    assert (config.threads("encode"), config.threads("generate")) == threads


@pytest.mark.parametrize(
    ("sets", "encode", "generate"),
    [
        (["placement=separate"], "", ""),
        (["placement=separate", "generate.threads=2"], "", "generate.threads"),
        # One process has the threads of both stages.
        (["placement=together"], "", ""),
        (["placement=together", "encode.threads=1"], "encode.threads", "encode.threads"),
        (
            ["placement=together", "encode.replicas=0", "encode.threads=1"],
            "encode.threads",
            "",
        ),
        (["generate.tensor_parallel=2"], "", "generate.tensor_parallel"),
        (["generate.tensor_parallel=2", "generate.threads=1"], "", "generate.threads"),
        (["encode.device=cuda", "encode.threads=1"], "encode.device", ""),
    ],
)
def test_config_names_the_setting_that_fixes_the_threads(
    sets: list[str], encode: str, generate: str
) -> None:
    config = load_config(None, sets=sets, environ={}).config
    found = (config.threads_fixed_by("encode"), config.threads_fixed_by("generate"))
    assert found == (encode, generate)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (
            ["generate.replicas=2"],
            (
                "encode.replicas: with placement = together both stages run in the same processes: "
                "value 1, limit generate.replicas, which is 2. Remedy:"
            ),
        ),
        (
            ["encode.tensor_parallel=4", "generate.tensor_parallel=2"],
            (
                "encode.tensor_parallel: with placement = together both stages run in the same processes: "
                "value 4, limit generate.tensor_parallel, which is 2. Remedy:"
            ),
        ),
    ],
)
def test_config_stages_together_are_as_many(sets: list[str], expected: str) -> None:
    """Worker group i serves encode-i and generate-i, so there are as many of both; apart they may differ."""
    assert refusal([*sets, "placement=together"]).startswith(expected)
    load_config(None, sets=sets, environ={})
    both = ["encode.replicas=2", "generate.replicas=2", "placement=together"]
    assert load_config(None, sets=both, environ={}).config.ranks == 4
