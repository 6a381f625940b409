"""Checks of the speculative-decoding configuration: ranks that verify draft tokens, and a draft model."""

from __future__ import annotations

import logging

import msgspec

from vsched.config import Config, ConfiguredPolicies
from vsched.errors import ConfigError, limit_message
from vsched.policy import DRAFT_TOKENS_MAX, Draft, DraftingView
from vsched.policy_host.seats import PolicySeats
from vsched.types import ModelInfo
from vsched.worker.contract import Preprocessor, WorkerPlugin
from vsched.worker.registry import load_worker

logger = logging.getLogger(__name__)
SAMPLES = 1000
"""Number of tokens compared between two vocabularies, evenly spread."""


def verifies_drafts(config: Config, info: ModelInfo, policies: ConfiguredPolicies) -> bool:
    """Return True if ranks can verify draft tokens; otherwise `generate.drafting` is never called.

    Raises:
        ConfigError: When ranks cannot, and the policy drafts for a request without a grammar; or when the policy uses a
            draft model, and none is configured.
    """
    plugin = load_worker(config.generate.plugin, path="generate.plugin")
    device = config.generate.device
    verifies = plugin.verifies_drafts(info, device=device)
    view = DraftingView(
        now_ns=0,
        held=False,
        outputs=1,
        outputs_max=256,
        running=1,
        rows_free=DRAFT_TOKENS_MAX,
        model=info.draft is not None,
    )
    seat = PolicySeats(policies.for_kernel()).add_seat("generate.drafting")
    draft: Draft = seat.decide(msgspec.structs.replace(view, state=seat.state))
    if draft.tokens and not verifies:
        raise ConfigError(
            limit_message(
                f"generate.drafting: the ranks of a model of type {info.family!r} cannot verify drafts on {device}",
                value=f"{draft.tokens} tokens a step",
                limit="none: drafts are for CPUs, and for models whose layers keep no state",
                remedy='set generate.drafting to {use = "none"}, or leave it out',
            )
        )
    if draft.tokens and draft.model and info.draft is None:
        raise ConfigError(
            "generate.drafting: the policy drafts with a model, and there is none. Remedy: set generate.draft_model to "
            "the folder of a smaller checkpoint of the same vocabulary, or choose another policy."
        )
    if info.draft is not None and not draft.model:
        logger.warning(
            "generate.draft_model is loaded, and generate.drafting does not ask it for a request that runs alone; "
            'the policy that does is {use = "draft-model"}'
        )
    return verifies


def inspect_draft(config: Config, plugin: WorkerPlugin, info: ModelInfo) -> ModelInfo | None:
    """Return the text part of the configured draft model; None if there is none.

    Raises:
        CheckpointError: When the checkpoint does not exist, or does not support the number of ranks.
        ConfigError: When it cannot be used as a draft model.
    """
    path, generate = config.generate.draft_model, config.generate
    if not path:
        return None
    draft = plugin.inspect(path, dtype=config.model.dtype, item_tokens_max=0).text_alone
    # It reads prompts in chunks, even with bidirectional attention in the prompt: guesses may be slightly worse.
    draft = msgspec.structs.replace(draft, prompt_atomic=False, item_atomic=False)
    if generate.tensor_parallel > 1:
        plugin.check_parallel(draft, stage="generate", ranks=generate.tensor_parallel)
    for model, key in ((info, "model.path"), (draft, "generate.draft_model")):
        if not plugin.verifies_drafts(model, device=generate.device):
            raise ConfigError(
                limit_message(
                    f"generate.draft_model: ranks cannot run drafts with the model of {key} on {generate.device}",
                    value=f"model_type {model.family!r}",
                    limit="drafts are for CPUs, and for models whose layers keep no state",
                    remedy="leave generate.draft_model out",
                )
            )
    return draft


def check_vocabulary(info: ModelInfo, own: Preprocessor, other: Preprocessor) -> None:
    """Check that a draft model has the target model's vocabulary; sizes may differ by padding.

    Raises:
        ConfigError: When a token differs.
    """
    size = min(own.info.vocab_size, other.info.vocab_size)
    for token in range(0, size, max(size // SAMPLES, 1)):
        one, drafted = own.token_bytes(token), other.token_bytes(token)
        if one != drafted:
            raise ConfigError(
                limit_message(
                    "generate.draft_model: it has another vocabulary",
                    value=f"token {token} is {drafted!r} there",
                    limit=f"{one!r}, as in {info.path}",
                    remedy="choose a smaller model of the same family, or leave it out",
                )
            )
