"""The engine in cells of a notebook. In Jupyter, write `await coroutine` in place of `run(coroutine)`."""

# %% Configure
import asyncio
import base64
import io
import os
import sys

from PIL import Image, ImageDraw, ImageFont

from vsched import Engine, SamplingParams
from vsched.config import load_config

runner = asyncio.Runner()
run = runner.run
checkpoint = sys.argv[1] if len(sys.argv) > 1 else "workers/demo-model"
config = load_config(None, sets=[f"model.path={checkpoint}"], environ=os.environ).config
engine = Engine(config)

# %% Load
run(engine.start())


# %% Generate, two requests at a time
async def complete(name: str, prompt: str) -> str:
    """Text of one request."""
    sampling = SamplingParams(max_tokens=8, seed=7)
    generation = await engine.generate(prompt=prompt, request_id=name, sampling=sampling)
    return "".join([delta.text async for delta in generation])


async def both() -> list[str]:
    """Texts of two requests in one batch."""
    return list(await asyncio.gather(complete("one", "red"), complete("two", "blue")))


print(run(both()))


# %% Ask about an image
async def ask(question: str, number: int) -> str:
    """Answer to a question about a picture with a number."""
    picture, file = Image.new("RGB", (224, 112), "white"), io.BytesIO()
    font = ImageFont.load_default(60)
    ImageDraw.Draw(picture).text((30, 20), str(number), fill="black", font=font)
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image"}, {"type": "text", "text": question}]
    texts = engine.stream(
        prompt=engine.preprocessor.render([{"role": "user", "content": content}]),
        images=[url],
        request_id="image",
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
    )
    return "".join([text async for text in texts])


print(run(ask("What number is in the image?", 314)))


# %% Cancel
async def first_text(prompt: str) -> str:
    """First text of a long output: leaving the loop aborts the request."""
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    generation = await engine.generate(prompt=prompt, request_id="long", sampling=sampling)
    async for delta in generation:
        if delta.text:
            return delta.text
    return ""


run(first_text("red"))

# %% Look at the engine
print(engine.statistics()["finished"])

# %% Stop
run(engine.stop())
runner.close()
