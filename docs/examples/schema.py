"""An answer that follows a JSON schema. First: `vsched serve workers/demo-model`."""

import json
import os

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none"
)
completion = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What colour is the object, and how many are there?"}],
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "objects", "schema": SCHEMA, "strict": True},
    },
    max_tokens=100,
)
print(json.loads(completion.choices[0].message.content or ""))
