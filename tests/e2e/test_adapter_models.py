"""Adapters over HTTP on every kind of model, with real ranks: each request gets the output of PEFT's own model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

httpx = pytest.importorskip("httpx")
peft: Any = pytest.importorskip("peft")
pytest.importorskip("numba")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.e2e.asking import TEXTS, Ask, drawn_image, held  # noqa: E402
from tests.e2e.conftest import SETTINGS  # noqa: E402
from tests.parity.architectures import make_checkpoint  # noqa: E402
from tests.parity.compare import prompts  # noqa: E402
from tests.patience import PATIENCE_S  # noqa: E402
from tests.workers.adapters.peft_adapters import make_adapter, make_whole_adapter  # noqa: E402
from tests.workers.quantized.test_weights import dequantized_twin  # noqa: E402
from tests.workers.reference import Reference  # noqa: E402
from vsched import Engine  # noqa: E402
from vsched.api.server import running_server  # noqa: E402
from vsched.config import load_config  # noqa: E402

pytestmark = [
    pytest.mark.asyncio(loop_scope="function"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.slow,
]

ADAPTERS = ("one", "two")
NAMES = ("base", *ADAPTERS)
OUTPUTS = 24
RANKS = "generate.tensor_parallel=2"
LOOKUP = (
    'generate.drafting={use="prompt-lookup", ngram=1, gain_min=0.01, speedup_min=0, pause_steps=4}'
)
CLOSE, FAR = 0.06, 0.5
"""Mean distance from PEFT's float32 log-probabilities: maximum in bfloat16, minimum with another adapter."""


class Kind(NamedTuple):
    """How a text model is served; `weights` is the quantization of the reference."""

    settings: Sequence[str] = ()
    weights: tuple[str, int] | None = None


KINDS = {
    "one rank": Kind(),
    "int8 on two ranks": Kind(
        [RANKS, 'generate.weights="int8"', "generate.weights_group=16"], ("int8", 16)
    ),
    "int4 with drafts": Kind([LOOKUP, 'generate.weights="int4"'], ("int4", 0)),
}
"""Each with another form of weights; float32 on two ranks and int8 on one are models with towers."""


@contextmanager
def adapted(model: Any, name: str) -> Iterator[None]:
    """Let PEFT's model use one of its adapters, or none."""
    if name == "base":
        with model.disable_adapter():
            yield
    else:
        model.set_adapter(name)
        yield


def with_adapters(model: Any, folder: Path) -> Any:
    """Return a model of transformers with all adapters in a folder, as PEFT loads them."""
    made = peft.PeftModel.from_pretrained(model, str(folder / "one"), adapter_name="one")
    made.load_adapter(str(folder / "two"), adapter_name="two")
    return made.eval()


def continued(model: Any, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([list(prompt)])
    fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUTS, **fixed
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


@asynccontextmanager
async def serving(base: Path, folder: Path, *settings: str) -> AsyncIterator[tuple[Any, Engine]]:
    """Serve a checkpoint with one adapter from the start, and load the other as a client of vLLM does."""
    sets = [
        *SETTINGS,
        "generate.context_tokens=0",
        f"model.path={base}",
        "model.name=base",
        "adapters.count_max=2",
        "adapters.rank_max=4",
        f"adapters.directory={folder}",
        f'adapters.load={{one = "{folder / "one"}"}}',
        *settings,
    ]
    async with running_server(load_config(None, sets=sets, environ={}).config) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            requested = {"lora_name": "two", "lora_path": "two"}
            reply = await client.post("/v1/load_lora_adapter", json=requested)
            assert reply.status_code == 200, reply.text
            yield client, server.engine
        assert not any(held(server.engine).values()), held(server.engine)
        assert all(group["restarts"] == 0 for group in server.engine.groups())


GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": OUTPUTS, "return_token_ids": True}


async def completed(client: Any, name: str, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    body = {"model": name, "prompt": list(prompt), **GREEDY, **more}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


async def chatted(client: Any, name: str, ask: Ask) -> list[int]:
    body = {"model": name, "messages": ask.messages, **GREEDY}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


def adapted_ranks(engine: Engine) -> list[tuple[str, str]]:
    """Return the stages and numbers of the ranks that have taken memory for adapters."""
    ranks = engine.statistics()["ranks"].items()
    return [(stage, n) for stage, each in ranks for n, memory in each.items() if memory["adapters"]]


def make_texts(folder: Path, **changes: Any) -> Path:
    """Write a text checkpoint, `base`, and adapters of it by their names; return the checkpoint."""
    base = folder / "base"
    base.mkdir()
    make_checkpoint("llama", base, **changes)
    for seed, name in enumerate(ADAPTERS):
        make_adapter(base, folder / name, seed)
    return base


def peft_model(base: Path, folder: Path) -> Any:
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return with_adapters(plain, folder)


@pytest.mark.parametrize(
    "kind",
    ["one rank", "int8 on two ranks", pytest.param("int4 with drafts", marks=pytest.mark.thorough)],
)
async def test_text_models_answer_as_peft(tmp_path: Path, kind: str) -> None:
    """All at once, each prompt with each adapter and with none; then again, from cached blocks."""
    base = twin = make_texts(tmp_path)
    settings, weights = KINDS[kind]
    if weights is not None:
        twin = dequantized_twin(base, tmp_path / "twin", torch.float32, *weights)
    reference = peft_model(twin, tmp_path)
    requested = [(name, prompt * 2) for prompt in prompts() for name in NAMES]
    wanted = []
    for name, prompt in requested:
        with adapted(reference, name):
            wanted.append(continued(reference, prompt))
    assert len({*map(tuple, wanted[:3])}) == 3, "each adapter changes the answer"
    async with serving(base, tmp_path, *settings) as (client, engine):
        for _ in range(2):
            replies = await asyncio.gather(*(completed(client, *each) for each in requested))
            assert [each["token_ids"] for each in replies] == wanted
        counts = engine.statistics()["generate"]
        assert counts["tokens_cached"] > 0
        assert counts["steps"] < len(requested) * OUTPUTS, "the requests shared steps"
        assert (counts["tokens_drafted"] > 0) == (LOOKUP in settings)
        assert len(adapted_ranks(engine)) == (2 if RANKS in settings else 1)


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        pytest.param("nano3", (), marks=pytest.mark.thorough),
        ("nano25", (RANKS, "encode.tensor_parallel=2")),
        ("nano3", ("placement=together",)),
        pytest.param(
            "nano25",
            ('generate.weights="int8"', 'encode.weights="int8"'),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["one rank", "two ranks", "together", "int8"],
)
async def test_models_with_towers_answer_as_peft(
    checkpoints: Callable[[str], Path], tmp_path: Path, size: str, settings: Sequence[str]
) -> None:
    """An adapter of tower and language model; the same images with each, at once: each has embeddings of its own."""
    base = twin = checkpoints(size)
    if any("int8" in each for each in settings):
        twin = dequantized_twin(base, tmp_path / "twin", torch.float32, "int8", 0)
    for seed, name in enumerate(ADAPTERS):
        make_whole_adapter(base, tmp_path / name, seed)
    reference = Reference(twin)
    reference.model = with_adapters(reference.model, tmp_path)
    asks = [Ask(TEXTS[n], [drawn_image(n)][: n % 2] * 2, count=OUTPUTS) for n in range(3)]
    async with serving(base, tmp_path, "adapters.encoder=true", *settings) as (client, engine):
        requested = [(name, ask) for ask in asks for name in NAMES]
        wanted = []
        for name, ask in requested:
            with adapted(reference.model, name):
                prompt = ask.prompt(engine.preprocessor)
                wanted.append(reference.generate(prompt, ask.images, OUTPUTS))
        assert len({*map(tuple, wanted[3:6])}) == 3, "each adapter changes the answer"
        for _ in range(2):
            assert await asyncio.gather(*(chatted(client, *each) for each in requested)) == wanted
        assert {stage for stage, _ in adapted_ranks(engine)} == {"encode", "generate"}


async def test_bfloat16_reports_the_probabilities_of_peft(tmp_path: Path) -> None:
    """The layers of vsched round differently, so the test compares probabilities of prompt and output."""
    base = make_texts(tmp_path, initializer_range=0.1)
    reference = peft_model(base, tmp_path)

    def reported(name: str, tokens: Sequence[int]) -> torch.Tensor:
        """Return the log-probability of each token but the first."""
        ids = torch.tensor([list(tokens)])
        with torch.inference_mode(), adapted(reference, name):
            logits = reference(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        found: torch.Tensor = logits[:-1].gather(1, ids[0, 1:, None])[:, 0]
        return found

    requested = [(name, prompt) for prompt in prompts() for name in NAMES]
    async with serving(base, tmp_path, "model.dtype=bfloat16") as (client, _):
        more: dict[str, Any] = {"logprobs": 0, "echo": True}
        replies = await asyncio.gather(*(completed(client, *each, **more) for each in requested))
    for (name, prompt), reply in zip(requested, replies, strict=True):
        tokens = [*prompt, *reply["token_ids"]]
        found = torch.tensor(reply["logprobs"]["token_logprobs"][1:])
        assert len(found) == len(tokens) - 1
        for other in NAMES:
            apart = float((found - reported(other, tokens)).abs().mean())
            assert apart < CLOSE if other == name else apart > FAR, (name, other, apart)
