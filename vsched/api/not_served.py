"""Known paths of OpenAI's and Anthropic's APIs, and of other servers, that are not served here.

The 404 for such a path names the service and an alternative.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class _Service(NamedTuple):
    """A service that is not supported: its name, the remedy, and its paths, which include all paths below them."""

    name: str
    remedy: str
    paths: tuple[str, ...]


_MODEL = "send these requests to a server of such a model"
_HISTORY = "send the whole history with each request; nothing is kept between requests"
_SERVICES = (
    _Service(
        "embeddings, scores and classes",
        "send these requests to a server of an embedding model; ranks here sample tokens and send no hidden states",
        (
            *("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score"),
            *("/rerank", "/v1/rerank", "/v2/rerank"),
        ),
    ),
    _Service(
        "batches",
        "send the requests themselves, as many at a time as you like; the server batches them",
        ("/v1/batches", "/v1/messages/batches"),
    ),
    _Service(
        "files and uploads",
        "send images within the request, as URLs or data URLs",
        ("/v1/files", "/v1/uploads"),
    ),
    _Service("moderations", _MODEL, ("/v1/moderations",)),
    _Service(
        "reviews of content and safety",
        "leave it out; the server keeps no content that could be reviewed",
        ("/v1/compliance", "/v1/content_provenance_checks", "/v1/safety"),
    ),
    _Service("generation of images and videos", _MODEL, ("/v1/images", "/v1/videos")),
    _Service("audio", _MODEL, ("/v1/audio",)),
    _Service("live sessions", "stream a chat", ("/v1/realtime", "/v1/live")),
    _Service(
        "vector stores",
        "search in the client, and send the results with the request",
        ("/v1/vector_stores",),
    ),
    _Service(
        "conversations, assistants and threads",
        _HISTORY,
        ("/v1/conversations", "/v1/assistants", "/v1/threads"),
    ),
    _Service(
        "fine-tuning and its graders",
        "train elsewhere, and have an operator load the result as a LoRA adapter",
        ("/v1/fine_tuning", "/v1/fine-tunes"),
    ),
    _Service(
        "agents, skills, containers and evaluations",
        "run them in the client; the server only answers requests",
        (
            *("/v1/agents", "/v1/chatkit", "/v1/containers", "/v1/decisions", "/v1/deployments"),
            *("/v1/deployment_runs", "/v1/dreams", "/v1/environments", "/v1/evals"),
            *("/v1/memory_stores", "/v1/sessions", "/v1/skills", "/v1/tunnels", "/v1/vaults"),
        ),
    ),
    _Service(
        "administration of accounts",
        "name keys and tenants in the server's configuration",
        (
            *("/v1/organization", "/v1/organizations", "/v1/projects", "/v1/user_profiles"),
            *("/v1/webhook_endpoints", "/v1/webhook_event_types"),
        ),
    ),
    _Service(
        "older completions",
        "send it to /v1/completions, /v1/chat/completions or /v1/messages",
        ("/v1/complete", "/v1/edits", "/v1/engines"),
    ),
    _Service(
        "counting the tokens of a response",
        "send its input as messages to /tokenize or /v1/messages/count_tokens",
        ("/v1/responses/input_tokens",),
    ),
    _Service(
        "compaction of a history",
        "shorten the history in the client",
        ("/v1/responses/compact",),
    ),
    _Service(
        "cancelling a response by its id",
        "close the connection that waits for it; that ends the request",
        ("/v1/responses/{id}/cancel",),
    ),
    _Service(
        "stored inputs and messages",
        _HISTORY,
        ("/v1/responses/{id}/input_items", "/v1/chat/completions/{id}/messages"),
    ),
)
_STORED = _Service(
    "changing or deleting a stored answer", "leave it out; answers are not stored", ()
)
_PATTERNS = [
    (re.compile(re.escape(path).replace(r"\{id\}", "[^/]+") + "(/.*)?"), service)
    for service in _SERVICES
    for path in service.paths
]
_STORED_PATH = re.compile("/v1/(chat/completions|responses)/.+")


def not_served(path: str, method: str = "GET") -> str | None:
    """Return the error message for a known path that is not served; None for any other path."""
    for pattern, service in _PATTERNS:
        if pattern.fullmatch(path):
            return _message(path, service)
    if method != "GET" and _STORED_PATH.fullmatch(path):
        return _message(path, _STORED)
    return None


def _message(path: str, service: _Service) -> str:
    return f"`{path[:100]}` is not served ({service.name}). Remedy: {service.remedy}."
