"""A rank that dies or hangs costs no request a token."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.e2e.asking import DRAWN, TEXTS, Ask, answer, begin, drawn_image, now_and_then
from tests.e2e.losing import answers_over_a_kill
from tests.patience import until
from vsched import Config, Engine, SamplingParams
from vsched.policy import Admission, AdmissionView, RequestPolicy

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]

Generated = Callable[..., list[list[int]]]


def asks(seed: int, count: int) -> list[Ask]:
    """Return questions about images that were not sent before."""
    return [
        Ask(TEXTS[n % 5], [drawn_image(seed + 10 * n + k) for k in range(n % 3)], count=40)
        for n in range(1, count + 1)
    ]


async def test_killed_generate_rank_loses_no_token(engine: Engine, generated: Generated) -> None:
    """Streams pause for the restart, and resume at the same token; seeded sampling, too."""
    questions = asks(2000, 4)
    wanted = generated("nano25", questions)
    drawn = (await answer(engine, questions[1], DRAWN)).token_ids
    encode_pid, generate_pid = engine.rank_pids
    started = [await begin(engine, ask) for ask in questions]
    started.append(await begin(engine, questions[1], DRAWN))
    found = await answers_over_a_kill(engine, started, generate_pid)
    assert [one.token_ids for one in found] == [*wanted, drawn]
    assert [one.text for one in found[:-1]] == list(map(engine.preprocessor.detokenize, wanted))
    assert engine.rank_pids[0] == encode_pid, "the encoder was not affected"
    assert engine.rank_pids[1] != generate_pid


async def test_sampled_placeholder_is_no_image(engine: Engine, generated: Generated) -> None:
    """Also when outputs are recomputed as a part of the context."""
    (ask,) = [one for one in asks(2500, 7) if one.images][:1]
    placeholder = engine.info.placeholder

    def say(bias: float) -> list[int]:
        return generated("nano25", [ask], sequence_bias={(placeholder,): bias})[0]

    bias, tokens = now_and_then(placeholder, say)
    sampling = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=ask.count, logit_bias=((placeholder, bias),)
    )
    started = [await begin(engine, ask, sampling)]
    [found] = await answers_over_a_kill(engine, started, engine.rank_pids[1], tokens=ask.count // 2)
    assert found.token_ids == tokens


async def test_killed_encode_rank_loses_no_image(engine: Engine, generated: Generated) -> None:
    """Killed during a batch; text is served meanwhile, images when it is back."""
    questions = [ask for ask in asks(3000, 6) if ask.images]
    text = Ask(TEXTS[4], count=30)
    encode_pid, generate_pid = engine.rank_pids
    os.kill(encode_pid, signal.SIGSTOP)
    started = [await begin(engine, ask) for ask in questions]
    await until(lambda: engine.statistics()["encode"]["running_items"] > 0, "it has a batch")
    assert (await answer(engine, text)).token_ids == generated("nano25", [text])[0]
    assert not any(one.output_tokens for one in started)
    found = await answers_over_a_kill(engine, started, encode_pid, tokens=-1)
    assert [one.token_ids for one in found] == generated("nano25", questions)
    assert engine.rank_pids[1] == generate_pid, "the language model was not affected"
    assert engine.rank_pids[0] != encode_pid


class Stuck(RequestPolicy, frozen=True, kw_only=True):
    """Never returns."""

    def admit(self, view: AdmissionView) -> Admission:
        time.sleep(3600)
        return Admission(())


async def test_policy_that_does_not_return_is_replaced_while_the_server_goes_on(
    configure: Callable[..., Config], generated: Generated
) -> None:
    (ask,) = asks(2700, 1)
    stuck = f"generate.admission.use={__name__}:Stuck"
    async with Engine(configure("nano25", stuck, "policies.call_limit_s=0.5")) as engine:
        found = await answer(engine, ask)
        assert [found.token_ids] == generated("nano25", [ask])
        replaced = engine.statistics()["policy_replaced"]
        assert "did not return within 0.5 s" in replaced["generate.admission"]
