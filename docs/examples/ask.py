"""Ask about a picture. First: `vsched serve workers/demo-model`."""

import base64
import io
import os

from openai import OpenAI
from PIL import Image, ImageDraw, ImageFont

picture = Image.new("RGB", (224, 112), "white")
ImageDraw.Draw(picture).text((30, 20), "2718", fill="navy", font=ImageFont.load_default(60))
buffer = io.BytesIO()
picture.save(buffer, "PNG")
url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none"
)
completion = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "What number is in the image?"},
            ],
        }
    ],
    temperature=0,
)
print(completion.choices[0].message.content)
