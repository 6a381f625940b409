"""Models in the format of Anthropic's /v1/models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from vsched.api.responses import Model


class MessagesModel(msgspec.Struct, tag_field="type", tag="model"):
    """The served model or an adapter."""

    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int
    lifecycle: str = "active"


class MessagesModelList(msgspec.Struct):
    """All models, on one page."""

    data: list[MessagesModel]
    first_id: str
    last_id: str
    has_more: bool = False


def messages_model(model: Model) -> MessagesModel:
    """Convert a model to Anthropic's format."""
    created_at = datetime.fromtimestamp(model.created, UTC)
    return MessagesModel(model.id, model.id, created_at, model.max_model_len)


def messages_model_list(models: Sequence[Model]) -> MessagesModelList:
    """Convert models, at least one, to Anthropic's format."""
    data = [messages_model(each) for each in models]
    return MessagesModelList(data, data[0].id, data[-1].id)
