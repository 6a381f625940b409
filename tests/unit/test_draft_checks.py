"""Checks at start of speculative decoding that is impossible as configured, or unused."""

from __future__ import annotations

import msgspec
import pytest

from vsched.assembly import inspect_draft, verifies_drafts
from vsched.config import Config, load_config, resolve_policies
from vsched.errors import ConfigError
from vsched.sim.ranks.plugin import HYBRID, NAME, plugin

INFO = plugin.inspect("model", dtype="auto", item_tokens_max=0)
STATEFUL = plugin.inspect(HYBRID, dtype="auto", item_tokens_max=0)
WITH_DRAFT = msgspec.structs.replace(INFO, draft=INFO.text_alone)
UNASKED = "generate.draft_model is loaded, and generate.drafting does not ask it"


def config_of(policy: str) -> Config:
    sets = [f"generate.plugin={NAME}", f'generate.drafting={{use="{policy}"}}']
    return load_config(None, sets=sets, environ={}).config


@pytest.mark.parametrize(
    ("policy", "warned"),
    [("draft-model", False), ("prompt-lookup", True), ("forced-tokens", True), ("none", True)],
)
def test_warning_about_an_unused_draft_model(
    policy: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(policy)
    assert verifies_drafts(config, WITH_DRAFT, resolve_policies(config))
    assert (UNASKED in caplog.text) == warned


def test_drafts_are_refused_without_what_they_need() -> None:
    asks = config_of("draft-model")
    with pytest.raises(ConfigError, match=r"drafts with a model, and there is none"):
        verifies_drafts(asks, INFO, resolve_policies(asks))
    looks = config_of("prompt-lookup")
    assert verifies_drafts(looks, INFO, resolve_policies(looks))
    with pytest.raises(ConfigError, match=r"cannot verify drafts"):
        verifies_drafts(looks, STATEFUL, resolve_policies(looks))
    nothing = config_of("none")
    assert not verifies_drafts(nothing, STATEFUL, resolve_policies(nothing))


def test_draft_model_gets_a_prompt_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for a model whose prompts are bidirectional: to the draft model they are ordinary tokens."""
    whole = msgspec.structs.replace(INFO, prompt_atomic=True, item_atomic=True)
    monkeypatch.setattr(type(plugin), "inspect", lambda *_, **_given: whole)
    sets = [f"generate.plugin={NAME}", "generate.draft_model=small"]
    config = load_config(None, sets=sets, environ={}).config
    found = inspect_draft(config, plugin, INFO)
    assert found is not None
    assert not found.prompt_atomic
    assert not found.item_atomic
    with pytest.raises(ConfigError, match=r"generate\.draft_model: ranks cannot run drafts"):
        inspect_draft(config, plugin, STATEFUL)
