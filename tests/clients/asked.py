"""Questions of the scripts, and the server's address: the runner passes them in the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

URL = os.environ["VSCHED_TEXT_URL"]
MODEL = "smollm2"
CHECKPOINT = os.environ["VSCHED_TEXT_CHECKPOINT"]
CONTEXT_TOKENS = int(os.environ["VSCHED_TEXT_CONTEXT"])
VISION_URL = os.environ["VSCHED_VISION_URL"]
VISION_MODEL = "demo"
PICTURE = os.environ["VSCHED_PICTURE"]
"""The path of a PNG file; its question and the right answer follow."""
PICTURE_QUESTION = os.environ["VSCHED_PICTURE_QUESTION"]
PICTURE_ANSWER = os.environ["VSCHED_PICTURE_ANSWER"]
PICTURE_URL = os.environ["VSCHED_PICTURE_URL"]

CAPITAL = "What is the capital of France?"
TOO_LONG = "word " * (CONTEXT_TOKENS + 100)
WEATHER = "What is the weather in Paris, in celsius?"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": PARAMETERS,
        "strict": True,
    },
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


def user(text: str) -> list[Any]:
    """Return the messages of a question."""
    return [{"role": "user", "content": text}]


def about_picture() -> list[Any]:
    """Return the messages of a question about the picture."""
    image = {"type": "image_url", "image_url": {"url": PICTURE_URL}}
    text = {"type": "text", "text": PICTURE_QUESTION}
    return [{"role": "user", "content": [image, text]}]


def check_picture(answer: str | None) -> None:
    """Fail unless the answer about the picture is right."""
    assert answer is not None
    assert answer.strip() == PICTURE_ANSWER, f"{answer!r} is not {PICTURE_ANSWER!r}"


def check_weather(arguments: dict[str, Any]) -> None:
    """Fail unless the arguments of the function are valid."""
    assert list(arguments) == ["city", "unit"], arguments
    assert arguments["unit"] in PARAMETERS["properties"]["unit"]["enum"], arguments


def run(tool: str, *words: str, **environment: str) -> str:
    """Run a tool of this environment without a network; return its output, and fail if the tool does."""
    command = [str(Path(sys.executable).parent / tool), *words]
    given = {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | given, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
