"""The content parts `image_embeds` and `video_embeds`."""

from __future__ import annotations

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from tests.unit.media.fakes import model_info
from vsched.media import MediaReference


def user(*parts: object) -> dict[str, object]:
    return chat(messages=[{"role": "user", "content": list(parts)}])


async def test_embeddings_and_images_keep_their_order() -> None:
    """Mixed freely; the template sees placeholders only."""
    engine = FakeEngine()
    engine.preprocessor.info = model_info(video_token_id=2)
    body = user(
        {"type": "image_embeds", "image_embeds": {"data": "one"}},
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": "data:two"},
        {"type": "image_embeds", "image_embeds": {"data": "three"}},
        {"type": "video_embeds", "video_embeds": {"url": "https://four"}},
        {"type": "image_url", "image_url": "data:five", "attention_spans": [[0, 4], [6, 8]]},
    )
    assert (await post(engine, CHAT, body)).status == 200
    call = engine.calls[0]
    assert call["images"] == [
        MediaReference("one", is_embedded=True),
        MediaReference("data:two"),
        MediaReference("three", is_embedded=True),
        MediaReference("https://four", is_video=True, is_embedded=True),
        MediaReference("data:five", attention=((0, 4), (6, 8))),
    ]
    assert call["prompt"] == "user:\x01a\x01\x01\x01\x01"


MISSHAPEN: list[object] = [
    *(None, "data", [], {}, {"data": 5}, {"data": ["A" * 5000]}, {"url": "A" * 5000}),
    *({"data": "AAAA", "url": "data:,AAAA"}, {"data": ""}, {"url": None}),
]


@each_case("value", MISSHAPEN)
async def test_misshapen_part_is_refused_without_quoting_it(value: object) -> None:
    """A 400 that names the position."""
    engine = FakeEngine()
    for name in ("image_embeds", "video_embeds"):
        reply = await post(engine, CHAT, user({"type": name, name: value}))
        assert reply.status == 400
        assert name in reply.error["message"] or reply.error["code"] == "unknown_parameter"
        assert "AAAA" not in reply.error["message"]
    assert engine.calls == []


async def test_unknown_part_names_those_that_are_known() -> None:
    reply = await post(FakeEngine(), CHAT, user({"type": "movie", "movie": "x"}))
    assert (
        "text, image_url, video_url, video, image_embeds, video_embeds, refusal or thinking"
        in reply.error["message"]
    )
