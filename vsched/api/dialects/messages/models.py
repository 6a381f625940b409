"""Models as Anthropic's /v1/models tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from vsched.api.responses import Model


class MessagesModel(msgspec.Struct, tag_field="type", tag="model"):
    """The served model, or an adapter."""

    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int
    lifecycle: str = "active"


class MessagesModelList(msgspec.Struct):
    """All of them, on one page."""

    data: list[MessagesModel]
    first_id: str
    last_id: str
    has_more: bool = False


def messages_model(model: Model) -> MessagesModel:
    """Return a model in Anthropic's form."""
    created_at = datetime.fromtimestamp(model.created, UTC)
    return MessagesModel(model.id, model.id, created_at, model.max_model_len)


def messages_model_list(models: Sequence[Model]) -> MessagesModelList:
    """Return models, at least one, in Anthropic's form."""
    data = [messages_model(each) for each in models]
    return MessagesModelList(data, data[0].id, data[-1].id)
