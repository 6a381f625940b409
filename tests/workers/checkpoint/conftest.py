"""Preprocessors and tokenizers of the smallest checkpoints, loaded once per session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.workers.driver import Checkpoints, inspect
from vsched.worker.contract import Preprocessor
from vsched_workers.plugin import plugin


@pytest.fixture(scope="session")
def load(checkpoints: Checkpoints) -> Callable[..., Preprocessor]:
    """Return the preprocessor of a checkpoint, which limits the tokens of an image if given."""

    @functools.cache
    def load_one(size: str, budget: int = 0) -> Preprocessor:
        return plugin.load_preprocessor(inspect(checkpoints(size), item_tokens_max=budget))

    return load_one


@pytest.fixture(scope="session")
def front(load: Callable[..., Preprocessor]) -> Preprocessor:
    return load("nano25")


@pytest.fixture(scope="session")
def tokenizer(checkpoints: Checkpoints) -> Any:
    """Return the tokenizer of the checkpoint of `front`, loaded by transformers."""
    return AutoTokenizer.from_pretrained(checkpoints("nano25"))
