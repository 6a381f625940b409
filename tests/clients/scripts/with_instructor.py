"""instructor: typed answers in three of its modes."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from instructor.core import IncompleteOutputException
from pydantic import BaseModel, Field

from tests.clients import asked


class Place(BaseModel):
    """What free JSON of so small a model may hold: its schema is in the prompt alone."""

    name: str
    country: str


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
    size: Literal["small", "large"]


def typed(mode: instructor.Mode, model: type[BaseModel] = City, **options: Any) -> Any:
    client = instructor.from_openai(openai.OpenAI(base_url=asked.URL, api_key="none"), mode=mode)
    return client.chat.completions.create(
        model=asked.MODEL,
        messages=asked.user("Describe Paris: its name, its country and its size."),
        response_model=model,
        max_retries=1,
        temperature=0,
        **{"max_tokens": 200, **options},
    )


def check_tools() -> None:
    assert isinstance(typed(instructor.Mode.TOOLS), City)


def check_json() -> None:
    assert isinstance(typed(instructor.Mode.JSON, Place), Place)


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
            messages=asked.user("Describe Paris: its name, its country and its size."),
            response_model=City,
            temperature=0,
            max_tokens=200,
        )
    )
    assert parts[-1].size in {"small", "large"}
