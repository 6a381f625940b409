"""Ask about two images, twice: the first is encoded and prefilled once. First: `vsched serve workers/demo-model`."""

import base64
import io
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionContentPartParam
from PIL import Image, ImageDraw, ImageFont


def number_image(number: str) -> ChatCompletionContentPartParam:
    """Content part with a drawn number."""
    picture = Image.new("RGB", (224, 112), "white")
    ImageDraw.Draw(picture).text((30, 20), number, fill="black", font=ImageFont.load_default(60))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none"
)
for number in ("2718", "1618"):
    completion = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    number_image("314"),
                    number_image(number),
                    {"type": "text", "text": "What number is in the second image?"},
                ],
            }
        ],
        temperature=0,
    )
    usage = completion.usage
    cached = usage and usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
    print(f"{completion.choices[0].message.content} ({cached} prompt tokens from the cache)")
