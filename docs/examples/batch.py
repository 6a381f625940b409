"""Run a batch offline, without a server: `python batch.py CHECKPOINT`."""

import sys

from PIL import Image, ImageDraw, ImageFont

from vsched import LLM, SamplingParams


def number_image(number: int) -> Image.Image:
    """Picture with a number."""
    picture = Image.new("RGB", (224, 112), "white")
    font = ImageFont.load_default(60)
    ImageDraw.Draw(picture).text((30, 20), str(number), fill="black", font=font)
    return picture


numbers = range(100, 1000, 111)
conversations = [
    [
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": number_image(number)},
                {"type": "text", "text": "What number is in the image?"},
            ],
        }
    ]
    for number in numbers
]
with LLM(sys.argv[1] if len(sys.argv) > 1 else "workers/demo-model") as llm:
    answers = llm.chat(conversations, SamplingParams(max_tokens=16, temperature=0.0))
right = sum(answer.text == str(number) for number, answer in zip(numbers, answers, strict=True))
print(f"{right} of {len(answers)} numbers read correctly")
