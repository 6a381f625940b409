"""instructor: typed answers in three of its modes."""

from __future__ import annotations

import json
from typing import Any, Literal

import instructor
import openai
from instructor.core import IncompleteOutputException
from pydantic import BaseModel, Field

from tests.clients import asked

DESCRIBE = "Describe Paris: its name, its country and its size."


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
    size: Literal["small", "large"]


def typed(mode: instructor.Mode, **options: Any) -> Any:
    client = instructor.from_openai(openai.OpenAI(base_url=asked.URL, api_key="none"), mode=mode)
    return client.chat.completions.create(
        model=asked.MODEL,
        response_model=City,
        max_retries=1,
        temperature=0,
        **{"max_tokens": 200, "messages": asked.user(DESCRIBE), **options},
    )


def check_tools() -> None:
    assert isinstance(typed(instructor.Mode.TOOLS), City)


def check_json() -> None:
    """The schema is only in the prompt, which so small a model may ignore: any object is valid."""
    try:
        assert isinstance(typed(instructor.Mode.JSON), City)
    except instructor.core.InstructorRetryException as error:
        said = error.last_completion.choices[0].message.content
        assert isinstance(json.loads(said), dict), said


def check_json_schema() -> None:
    assert isinstance(typed(instructor.Mode.JSON_SCHEMA), City)


def check_cut_answers() -> None:
    try:
        typed(instructor.Mode.TOOLS, max_tokens=6)
    except (IncompleteOutputException, instructor.core.InstructorRetryException) as error:
        assert "ncomplete" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("a cut answer was taken")


def check_partial_stream() -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=asked.URL, api_key="none"), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = list(
        client.chat.completions.create_partial(
            model=asked.MODEL,
            messages=asked.user(DESCRIBE),
            response_model=City,
            temperature=0,
            max_tokens=200,
        )
    )
    assert parts[-1].size in {"small", "large"}
