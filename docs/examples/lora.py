"""Load a LoRA adapter into a running server, ask it, and unload it.

First: `vsched serve PATH --set adapters.count_max=1 --set adapters.directory=FOLDER`, with an adapter in `FOLDER/mine`.
"""

import os

import httpx
from openai import OpenAI

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = OpenAI(base_url=url, api_key="none")
base = client.models.list().data[0].id
admin = f"{url.removesuffix('/v1')}/admin/adapters"

loaded = httpx.post(admin, json={"name": "mine", "path": "mine"}, timeout=120)
loaded.raise_for_status()
try:
    for model in (base, "mine"):
        completion = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What shape is it?"}],
            max_tokens=8,
            temperature=0,
        )
        print(f"{model}: {completion.choices[0].message.content}")
finally:
    httpx.delete(f"{admin}/mine", timeout=120).raise_for_status()
