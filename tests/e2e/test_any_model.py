"""A small Llama behind `vsched serve`, without any setting for the kind of model."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.asking import data_url, drawn_image
from tests.e2e.conftest import SETTINGS
from tests.e2e.serving import ServeProcess
from tests.parity.architectures import make_checkpoint
from tests.parity.compare import OUTPUTS, generated, prompts
from tests.patience import PATIENCE_S
from vsched_workers.plugin import plugin

VISION_WORDS = re.compile("image|vision|encod|pixel|arena", re.IGNORECASE)
SETS = [
    one
    for one in SETTINGS
    if one.startswith(("generate.", "server.")) and not one.startswith("generate.context_tokens")
]
"""The model has a context of 512."""


def post(url: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
@pytest.mark.thorough  # test_text_models.py has the tokens, test_life.py the command
def test_serve_answers_as_generate_does(tmp_path: Path) -> None:
    llama = tmp_path / "llama"
    make_checkpoint("llama", llama)
    front = plugin.load_preprocessor(plugin.inspect(str(llama), dtype="auto", item_tokens_max=0))
    options = {"temperature": 0, "max_tokens": OUTPUTS, "ignore_eos": True}
    with ServeProcess(llama, settings=SETS) as server:
        url = f"{server.url}/v1"
        assert not VISION_WORDS.search("".join(server.log)), server.log
        for prompt, tokens in zip(prompts(), generated(llama, prompts()), strict=True):
            status, answer = post(f"{url}/completions", prompt=prompt, **options)
            assert (status, answer["choices"][0]["text"]) == (200, front.detokenize(tokens))
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
        chat = front.tokenize(front.render(messages))
        status, answer = post(f"{url}/chat/completions", messages=messages, **options)
        assert status == 200
        expected = front.detokenize(generated(llama, [chat])[0])
        assert answer["choices"][0]["message"]["content"] == expected
        picture = {"type": "image_url", "image_url": {"url": data_url(drawn_image(1))}}
        messages[0]["content"] = [{"type": "text", "text": "Hello"}, picture]
        status, answer = post(f"{url}/chat/completions", messages=messages, **options)
        assert (status, answer["error"]["code"]) == (400, "images_not_taken")
