"""Template, tokenizer and image processor compared with transformers'; parsing of output; embeddings of clients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoImageProcessor

from tests.parity.vision_checkpoints import make_vision_checkpoint
from tests.workers.driver import Checkpoints, drawn_image, inspect, values_of
from tests.workers.properties import REPEATABLE
from vsched.config import MediaConfig
from vsched.errors import CheckpointError, RequestRefused
from vsched.media.embeddings import read_embedding
from vsched.types import ArraySpec, ModelInfo
from vsched.worker.contract import AnswerPart, ImagePlan, ItemPlan, PixelBounds, Preprocessor
from vsched_workers.checkpoint.preprocess.qwen import QwenPreprocessor
from vsched_workers.checkpoint.preprocess.text import TemplateParser
from vsched_workers.checkpoint.tokenize import TokenTable
from vsched_workers.families.qwen_image import PIXELS, grid_of, image_processing
from vsched_workers.plugin import TRAINED, plugin

Load = Callable[..., Preprocessor]


@given(
    width=st.integers(1, 400), height=st.integers(1, 400), budget=st.sampled_from([1, 7, 64, 300])
)
@REPEATABLE
def test_plan_image_agrees_with_process_image(
    load: Load, size: str, width: int, height: int, budget: int
) -> None:
    """Processing matches the plan, and is within the budget or refused with all numbers."""
    preprocessor = load(size, budget)
    image = Image.new("RGB", (width, height))
    refused: RequestRefused | None = None
    try:
        plan = preprocessor.plan_image(width, height)
    except RequestRefused as refusal:
        refused = refusal
    if refused is not None:
        assert max(width, height) / min(width, height) > min(budget, 200)
        assert "limit" in refused.message
        assert "Remedy" in refused.message
        with pytest.raises(RequestRefused):
            preprocessor.process_image(image)
        return
    arrays = preprocessor.process_image(image)
    made = tuple(ArraySpec(name, each.dtype.name, each.shape) for name, each in arrays.items())
    assert made == plan.arrays
    time, rows, columns = grid_of(plan.metadata)
    assert len(arrays[PIXELS]) == time * rows * columns
    assert plan.tokens == time * rows * columns // 4
    assert 1 <= plan.tokens <= budget


@pytest.mark.parametrize(
    ("least", "most", "shape"),
    [
        *((None, None, shape) for shape in ((90, 60), (28, 28), (1, 1), (300, 17), (448, 300))),
        *((None, 24, shape) for shape in ((90, 60), (28, 28), (300, 17), (448, 300))),
        *((40, None, shape) for shape in ((90, 60), (28, 28))),
        *((16, 20, shape) for shape in ((300, 17), (448, 300))),
        (4, 6, (448, 300)),
    ],
)
def test_process_image_equals_transformers_also_with_bounds_of_a_request(
    load: Load,
    checkpoints: Checkpoints,
    size: str,
    shape: tuple[int, int],
    least: int | None,
    most: int | None,
) -> None:
    """Bit-identical pixels, after the lookup of their values by a rank, and the planned grid; bounds are in tokens."""
    processor, image = processor_of(checkpoints(size)), drawn_image(1, *shape)
    area = (processor.patch_size * processor.merge_size) ** 2
    bounds = PixelBounds(least and least * area, most and most * area)
    own = processor.size
    requested = {
        "shortest_edge": bounds.min_pixels or own["shortest_edge"],
        "longest_edge": bounds.max_pixels or own["longest_edge"],
    }
    wanted = processor(image, size=requested, return_tensors="np")
    front = load(size)
    assert isinstance(front, QwenPreprocessor)
    bounded = front.bounded(bounds, pixels_max=1 << 40)
    grid = grid_of(bounded.plan_image(*shape).metadata)
    assert grid == tuple(wanted["image_grid_thw"][0])
    made = bounded.process_image(image)
    assert values_of([made]).numpy().tobytes() == wanted["pixel_values"].tobytes()
    elsewhere = image_processing(bounded.image_recipe().settings)
    assert np.array_equal(elsewhere.process_image(image)[PIXELS], made[PIXELS])
    is_same = bounded.settings_digest == front.settings_digest
    assert is_same == (bounds == PixelBounds())


@functools.cache
def processor_of(path: Path) -> Any:
    return AutoImageProcessor.from_pretrained(path, backend="pil")


@pytest.mark.parametrize(
    ("width", "height", "code"),
    [
        (0, 5, "image_empty"),
        (5, 0, "image_empty"),
        (2010, 10, "image_aspect_ratio"),
        (19000, 100, "image_tokens_exceeded"),
    ],
)
def test_plan_image_refuses(load: Load, width: int, height: int, code: str) -> None:
    with pytest.raises(RequestRefused, match=r"value .*, limit .*\. Remedy: ") as refusal:
        load("nano25", 64).plan_image(width, height)
    assert refusal.value.code == code
    assert refusal.value.status == 400


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "I;16"])
def test_process_image_takes_other_modes(front: Preprocessor, mode: str) -> None:
    image = Image.new(mode, (60, 60), 1)
    found, wanted = (front.process_image(one)[PIXELS] for one in (image, image.convert("RGB")))
    assert np.array_equal(found, wanted)


def test_process_image_is_the_same_from_many_threads(front: Preprocessor) -> None:
    images = [drawn_image(seed, 60 + seed, 90) for seed in range(8)]
    alone = [front.process_image(image)[PIXELS] for image in images]
    with ThreadPoolExecutor(4) as pool:
        made = pool.map(front.process_image, images)
        together = [arrays[PIXELS] for arrays in made]
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_expand_replaces_placeholders(front: Preprocessor) -> None:
    mark = front.info.placeholder
    plans = [ImagePlan((), 2), ImagePlan((), 3)]
    assert front.expand([9, mark, 8, mark, 7], plans) == (
        [9, mark, mark, 8, mark, mark, mark, 7],
        [((1, 3),), ((4, 7),)],
    )
    assert front.expand([9, 8], []) == ([9, 8], [])


@pytest.mark.parametrize("images", [0, 1, 3])
def test_expand_refuses_other_numbers(front: Preprocessor, images: int) -> None:
    """Exactly as many placeholders as images."""
    mark = front.info.placeholder
    with pytest.raises(RequestRefused, match=f"value 2, limit {images}") as refusal:
        front.expand([mark, 8, mark], [ImagePlan((), 2)] * images)
    assert refusal.value.code == "image_count_mismatch"
    # A model could not determine the boundary between two adjacent images.
    with pytest.raises(RequestRefused) as refusal:
        front.expand([mark, mark], [ImagePlan((), 2)] * 2)
    assert refusal.value.code == "image_placeholders_touch"


def test_render_replaces_image_data_by_a_placeholder(front: Preprocessor) -> None:
    """The bytes of an image are not passed to the template."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = front.render([{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}])
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "content", [[{"type": "audio", "audio": "x"}], [{"text": "no type"}], ["x"], 7]
)
def test_render_refuses_requests_that_the_template_rejects(
    front: Preprocessor, content: Any
) -> None:
    with pytest.raises(RequestRefused) as refusal:
        front.render([{"role": "user", "content": content}])
    assert refusal.value.code == "invalid_messages"
    assert "/" not in refusal.value.message.replace("user/", "")
    assert "0x" not in refusal.value.message


@pytest.mark.parametrize("parts", [1, 40])
def test_render_refuses_text_that_cannot_fit_before_the_template_runs(
    front: Any, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering copies it several times under the GIL; all messages together count."""
    most = front.info.context_tokens * front._special._whole.bytes_per_token_max
    fits = [{"role": "user", "content": "a" * (most // parts)}] * parts
    assert "aaa" in front.render(fits)
    monkeypatch.setattr(front, "_rendered", None)
    text = [{"type": "text", "text": "a" * (parts + 1)}]
    with pytest.raises(RequestRefused, match="longer than the context"):
        front.render([*fits, {"role": "user", "content": text}])


@pytest.mark.parametrize("text", ["It is", "It is <|im_end|> and", "two\nlines"])
def test_render_goes_on_with_the_last_message(front: Preprocessor, text: str) -> None:
    """It stays open, even if it contains text like a special token."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    arguments = {"continue_final_message": True, "add_generation_prompt": False}
    rendered = front.render(messages, **arguments)
    assert rendered.endswith(f"<|im_start|>assistant\n{text}")


@given(text=st.text("aZ 0\n.é€😀<|>_", max_size=40))
@REPEATABLE
def test_detokenizer_gives_the_text_back_piece_by_piece(front: Preprocessor, text: str) -> None:
    """For any text and any split: the pieces add up to the text, and no piece has an incomplete character."""
    ids = front.tokenize(text)
    detokenizer = front.detokenizer()
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == text
    assert front.detokenize(ids) == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert b"".join(front.token_bytes(token) for token in ids).decode() == text


@given(ids=st.lists(st.integers(0, 383), max_size=30), size=st.integers(1, 3))
@REPEATABLE
def test_detokenize_equals_transformers(
    front: Preprocessor, tokenizer: Any, ids: list[int], size: int
) -> None:
    """For any tokens, including incomplete characters, one or several at a time: the same text as from transformers."""
    for special in (False, True):
        detokenizer = front.detokenizer(special=special)
        pushed = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        wanted = tokenizer.decode(
            ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        assert "".join(pushed) + detokenizer.flush() == wanted
        assert special or front.detokenize(ids) == wanted


def test_token_bytes_of_special_and_unknown_tokens(front: Preprocessor) -> None:
    assert front.token_bytes(front.info.placeholder) == b"<|image_pad|>"
    assert front.token_bytes(10**6) == b""
    assert front.detokenize([10**6]) == ""


def test_settings_digest_distinguishes_settings(load: Load) -> None:
    """The family, the settings and the clamp all count."""
    digests = {
        load(size, budget).settings_digest for size in ("nano25", "nano3") for budget in (0, 64)
    }
    assert len(digests) == 4
    info = load("nano25").info
    for family in ("qwen2_5_vl", "another"):
        made = plugin.load_preprocessor(msgspec.structs.replace(info, family=family))
        assert (made.settings_digest in digests) == (family == info.family)
    assert {len(digest) for digest in digests} == {32}


def test_load_preprocessor_refuses_a_tokenizer_larger_than_the_model(
    checkpoints: Checkpoints,
) -> None:
    """Otherwise an id beyond the embedding would crash the worker with the first prompt that contains it."""
    info = inspect(checkpoints("nano25"))
    smaller = msgspec.structs.replace(info, vocab_size=300)
    with pytest.raises(CheckpointError, match=r"value 383, limit 299\. Remedy"):
        plugin.load_preprocessor(smaller)


@pytest.mark.parametrize(
    ("tokens", "text", "template"),
    [
        (["<|tool_call>", "call:", "<tool_call|>", "<|turn>"], "<|tool_call>call:<tool_call|>", ""),
        (["<|channel|>", "<|end|>", "<|return|>"], "<|channel|><|end|>", ""),
        (["<|end|>", "<|message|>", "a"], "a", ""),
        (["<mull>", "</mull>", "<pad>"], "<mull></mull>", '{"open": "<mull>", "close": "</mull>"}'),
    ],
)
def test_texts_show_the_marks_of_calls_of_channels_and_of_the_template(
    tokens: list[str], text: str, template: str
) -> None:
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(each, special=each.startswith("<")) for each in tokens])
    table = TokenTable.of_tokenizer(backend, shown=template)
    assert table.decode([backend.get_vocab()[each] for each in tokens]) == text


TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<mull>", "close": "</mull>"},
        "content": {"close": "<end>"},
        "tool_calls": {
            "open": "<do>",
            "close": "</do>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def read(pieces: Any, prompt: str = "<assistant>") -> dict[str, str]:
    parser = TemplateParser(TEMPLATE, prompt, TOOLS)
    parts: list[AnswerPart] = [part for piece in pieces for part in parser.push(piece)]
    reported: dict[str, str] = {}
    for part in [*parts, *parser.finish()]:
        key = f"call {part.name}" if part.kind == "call" else part.kind
        reported[key] = reported.get(key, "") + part.text
    return reported


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("Hello.", {"content": "Hello."}),
        ("<mull>A < b.</mull>Yes.", {"reasoning": "A < b.", "content": "Yes."}),
        ('<do>{"name": "f", "arguments": {"a": "é"}}</do>', {"call f": '{"a": "é"}'}),
        (
            'I do.<do>{"name": "f", "arguments": {}}</do><do>{"name": "g", "arguments": {}}</do>',
            {"content": "I do.", "call f": "{}", "call g": "{}"},
        ),
        ("<do>no JSON</do> more", {"content": "<do>no JSON</do> more"}),
        ('<do>{"a": 1}</do>', {"content": '<do>{"a": 1}</do>'}),
    ],
)
def test_answers_are_read_as_their_checkpoint_says(answer: str, wanted: dict[str, str]) -> None:
    for pieces in ([answer], list(answer)):
        assert read(pieces) == wanted


def test_constructs_begun_in_the_prompt_are_continued() -> None:
    reported = read(["A.</mull>Yes."], "<user>Hi<assistant><mull>")
    assert reported == {"reasoning": "A.", "content": "Yes."}


def test_a_checkpoint_without_a_template_reads_no_answers() -> None:
    info: ModelInfo = inspect(TRAINED)
    front = plugin.load_preprocessor(info)
    assert not front.parses_answers


@pytest.mark.parametrize("name", ["llava", "llava_onevision", "internvl"])
def test_brought_rows_are_planned_by_the_size_of_their_image(name: str, tmp_path: Path) -> None:
    """For an architecture without a grid: the plan equals that for the image itself."""
    make_vision_checkpoint(name, tmp_path, weights=False)
    info = inspect(tmp_path)
    front = plugin.load_preprocessor(info)
    assert front.companion is not None
    plan = front.plan_image(90, 30)
    width = info.hidden_size * info.embedding_levels
    rows = np.ones((plan.tokens, width), np.float32)

    def read(size: tuple[int, int]) -> ItemPlan:
        file = safetensors.numpy.save({"embeds": rows, "image_size": np.array(size)})
        return read_embedding(file, front, MediaConfig())[1]

    assert read((30, 90)) == plan
    for size, code in (
        ((30, -90), "image_empty"),
        ((1 << 20, 1 << 20), "image_size_exceeded"),
        ((1 << 62, 1 << 62), "image_size_exceeded"),
    ):
        with pytest.raises(RequestRefused, match="Remedy: ") as caught:
            read(size)
        assert caught.value.code == code
