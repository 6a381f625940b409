"""`LLM`: batches over a real engine, without asyncio."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from PIL import Image

from tests.each_case import each_case
from tests.patience import PATIENCE_S
from tests.programs import ended
from vsched import LLM, Config, RequestRefused, SamplingParams, VschedError
from vsched.errors import CheckpointError, ConfigError

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(configure: Callable[..., Config]) -> Iterator[LLM]:
    with LLM(config=configure("nano25"), progress=False) as opened:
        yield opened
    opened.close()
    with pytest.raises(VschedError, match="closed"):
        opened.generate("Hello")


def picture(part: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}]


def test_offline_completions_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"{number} and" for number in range(40)]
    done = llm.generate(prompts, GREEDY)
    assert all((len(one.token_ids), one.finish_reason) == (5, "length") for one in done)
    alone = llm.generate(prompts[7], GREEDY)
    assert [one.token_ids for one in alone] == [done[7].token_ids]
    assert llm.generate([], GREEDY) == []


def test_offline_prompts_may_be_tokens(llm: LLM) -> None:
    (text,) = llm.generate("Hello there", GREEDY)
    token_ids = llm.engine.preprocessor.tokenize("Hello there")
    (tokens,) = llm.generate([token_ids], GREEDY)
    assert (tokens.text, tokens.prompt_tokens) == (text.text, len(token_ids))


def test_offline_chat_takes_one_conversation_or_many_with_images(llm: LLM) -> None:
    image = Image.new("RGB", (56, 56), "red")
    red = picture({"type": "image_pil", "image_pil": image})
    text = [{"role": "user", "content": "Hello"}]
    first, second = llm.chat(iter([red, text]), GREEDY)
    assert first.prompt_tokens > second.prompt_tokens
    singles: list[Any] = [red, red[0]]
    for single in singles:
        (again,) = llm.chat(single, GREEDY)
        assert again.token_ids == first.token_ids
        assert again.cached_tokens > 0


def test_offline_error_is_raised_or_kept(llm: LLM) -> None:
    prompts: list[Any] = ["short", "long " * 5000, {"prompt": "x", "image": []}, "short"]
    with pytest.raises(RequestRefused, match="context") as caught:
        llm.generate(prompts[:2], GREEDY)
    assert caught.value.__notes__ == ["This is entry 1 of the batch, counted from 0."]
    done = llm.generate(prompts, GREEDY, on_error="keep")
    assert [one.finish_reason for one in done] == ["length", "error", "error", "length"]
    assert "context" in done[1].error
    assert "images" in done[2].error
    with pytest.raises(RequestRefused, match="messages"):
        llm.chat([{"role": "emperor", "content": "Hello"}])


@each_case("mode", ["CMYK", "YCbCr", "HSV", "F", "1", "P", "LA"])
def test_offline_image_may_have_any_mode(llm: LLM, mode: str) -> None:
    part = {"type": "image_pil", "image_pil": Image.new("RGB", (56, 56), "white").convert(mode)}
    (done,) = llm.chat(picture(part), GREEDY, on_error="keep")
    assert (done.finish_reason, done.error) == ("length", "")


def test_offline_damaged_image_leaves_other_requests_alone(llm: LLM) -> None:
    file = io.BytesIO()
    Image.effect_noise((56, 56), 50).save(file, "PNG")
    image = Image.open(io.BytesIO(file.getvalue()[:-100]))
    bad = picture({"type": "image_pil", "image_pil": image})
    good = [{"role": "user", "content": "Hello"}]
    refused, done = llm.chat([bad, good], GREEDY, on_error="keep")
    assert (refused.finish_reason, done.finish_reason) == ("error", "length")
    assert "cannot be encoded" in refused.error


@each_case(
    ("prompts", "wanted"),
    [
        ([1, 2], "prompt is not valid: value [12], limit a text or a list of token ids"),
        (3, "value 3, limit a text or a list of token ids"),
        (b"x", "limit a text or a list of token ids"),
        ({"prompt": "x", "pictures": []}, "pass prompt, and images"),
        ({"prompt": "x", "images": "data:,"}, "pass images as such a list"),
        ({"prompt": "x", "images": Image.new("L", (1, 1))}, "pass images as such a list"),
        ({"prompt": "x", "images": None}, "pass images as such a list"),
    ],
)
def test_offline_requests_of_other_types_are_refused(llm: LLM, prompts: Any, wanted: str) -> None:
    with pytest.raises(RequestRefused, match=wanted):
        llm.generate(prompts, GREEDY)
    for messages in ("Hello", ["Hello"], [1], [[Image]]):
        with pytest.raises(RequestRefused, match="messages: "):
            llm.chat(cast("Any", messages), GREEDY)


def test_offline_sampling_parameter_as_an_argument_is_refused(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"pass SamplingParams\(max_tokens=\.\.\.\)"):
        llm.generate("Hello", max_tokens=5)


def test_offline_start_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(CheckpointError):
        LLM(tmp_path, settings="generate.slots=2")
    with pytest.raises(ConfigError, match="LLM: config is a whole"):
        LLM(tmp_path, config=Config())
    assert threading.active_count() == before


@pytest.mark.slow
def test_offline_closes_when_the_process_exits(configure: Callable[..., Config]) -> None:
    """Executors of the interpreter are closed before that: a traceback, and shared memory was left."""
    path = configure("nano25").model.path
    code = f"from vsched import LLM; llm = LLM({path!r}); llm.generate('Hello')"
    left = ended("-c", code, limit_s=5 * PATIENCE_S)
    assert (left.returncode, "Traceback" in left.stderr) == (0, False), left.stderr


async def test_offline_works_if_a_loop_runs(llm: LLM) -> None:
    """A notebook's thread has a running loop."""
    assert len(llm.generate("Hello", GREEDY)) == 1


def test_offline_progress_is_a_bar_on_a_terminal(
    configure: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, this is a terminal
    with LLM(config=configure("nano25")) as llm:
        loading = capsys.readouterr().err
        llm.generate(["One", "Two"], GREEDY)
    requests = capsys.readouterr().err
    assert "generate" in loading
    assert "2/2" in requests
    assert "tokens/s" in requests
