"""Let the model call a function, and give it the result.

First serve a model whose chat template has tools: `vsched serve PATH`.
"""

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str, unit: str) -> str:
    """Result of a call."""
    return f"{city}: 21 degrees {unit}"


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none"
)
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the weather in Paris?"}
]
reply = client.chat.completions.create(
    model=model, messages=messages, tools=[WEATHER], tool_choice="required", max_tokens=200
)
for call in reply.choices[0].message.tool_calls or ():
    if call.type == "function":
        arguments = json.loads(call.function.arguments)
        result = get_weather(**arguments)
        print(f"{call.function.name}({arguments}) -> {result}")
        messages += [
            {"role": "assistant", "tool_calls": [call.to_dict()]},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
answer = client.chat.completions.create(
    model=model, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=32
)
print(answer.choices[0].message.content)
