"""Exam questions as chat messages, and the check of their answers."""

from __future__ import annotations

import base64
from typing import Any

from vsched.checkpoint_tools import ExamTurn


def is_answer(text: str, expected: str) -> bool:
    """Return whether a text is the right answer, ignoring surrounding white space."""
    return text.strip() == expected


def data_url(png: bytes) -> str:
    """Return a PNG file as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def user_message(turn: ExamTurn) -> dict[str, Any]:
    """Return a turn as an OpenAI chat message: its images, then its question."""
    images = [{"type": "image_url", "image_url": {"url": data_url(png)}} for png in turn.images]
    return {"role": "user", "content": [*images, {"type": "text", "text": turn.question}]}
