"""Drafting policies: speculative decoding of a request, by draft model, prompt lookup or grammar."""

from vsched_policies.drafting.draft_model import ModelDrafts
from vsched_policies.drafting.forced_tokens import ForcedTokens
from vsched_policies.drafting.no_drafts import NoDrafts
from vsched_policies.drafting.prompt_lookup import PromptLookup

__all__ = ["ForcedTokens", "ModelDrafts", "NoDrafts", "PromptLookup"]
