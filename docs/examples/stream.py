"""Stream an answer, and print the token counts at its end. First: `vsched serve workers/demo-model`."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none"
)
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What number is in the image?"}],
    max_tokens=16,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage is not None:
        print(
            f"\n{chunk.usage.prompt_tokens} prompt, {chunk.usage.completion_tokens} output tokens"
        )
