"""The engine in cells of a notebook. In Jupyter, write `await coroutine` in place of `run(coroutine)`."""

# %% Configure
import asyncio
import os
import sys

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

# %% Look at the engine
print(engine.statistics()["finished"])

# %% Stop
run(engine.stop())
runner.close()
