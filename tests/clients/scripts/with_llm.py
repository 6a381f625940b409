"""Simon Willison's llm, as its command: models of `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.clients import asked

folder = Path(tempfile.mkdtemp(prefix="vsched-llm-"))
(folder / "extra-openai-models.yaml").write_text(
    f"""
- model_id: text
  model_name: {asked.MODEL}
  api_base: {asked.URL}
  supports_schema: true
  supports_tools: true
- model_id: vision
  model_name: {asked.VISION_MODEL}
  api_base: {asked.VISION_URL}
  vision: true
"""
)


def llm(*words: str) -> str:
    return asked.run("llm", *words, LLM_USER_PATH=str(folder))


def check_stream() -> None:
    assert "Paris" in llm("-m", "text", "-o", "temperature", "0", asked.CAPITAL)


def check_whole() -> None:
    words = ["-m", "text", "--no-stream", "-o", "temperature", "0", "-o", "max_tokens", "30"]
    assert "Paris" in llm(*words, asked.CAPITAL)


def check_conversation() -> None:
    llm("-m", "text", "-o", "temperature", "0", "My name is Ada.")
    assert llm("-c", "-o", "temperature", "0", "What is my name?").strip()


def check_schema() -> None:
    schema = json.dumps(asked.PARAMETERS)
    words = ["-m", "text", "--schema", schema, "-o", "temperature", "0", "-o", "max_tokens", "200"]
    asked.check_weather(json.loads(llm(*words, asked.WEATHER)))


def check_tools() -> None:
    """Tools are never forced, and so small a model may not call one, but it must reply."""
    words = ["-m", "text", "-T", "llm_version", "-o", "temperature", "0", "-o", "max_tokens", "100"]
    assert llm(*words, "What version of llm is this?").strip()


def check_images() -> None:
    words = ["-m", "vision", "-a", asked.PICTURE, "-o", "temperature", "0"]
    asked.check_picture(llm(*words, asked.PICTURE_QUESTION))
