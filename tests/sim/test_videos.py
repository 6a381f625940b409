"""Videos in the simulated engine: frame groups are shared by content between requests, and answers depend on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.cluster.client_sessions import ClientBehaviour
from vsched.sim.workload.requests import Arrival, Image, Text, Video


@pytest.mark.sim
@pytest.mark.parametrize(
    "behaviour", [ClientBehaviour(), ClientBehaviour(http=False), ClientBehaviour(remote=True)]
)
async def test_groups_are_encoded_once(
    sim_engine: Callable[..., SimEngine], behaviour: ClientBehaviour
) -> None:
    """A video, the same longer by two groups, and another one between images."""
    prompts = [
        (Video("a", 4, 7), Text(1, 5)),
        (Text(2, 5), Video("a", 6, 7), Text(3, 5)),
        (Image("c", 9), Video("b", 1, 12), Image("d", 5), Text(4, 5)),
    ]
    encoded, answers = [], []
    async with sim_engine(small_config()) as engine:
        for number, prompt in enumerate(prompts):
            before = engine.engine.statistics()["encode"]["items_encoded"]
            arrival = Arrival(at_ns=0, request_id=f"r{number}", prompt=prompt, output_tokens=6)
            session = engine.send(arrival, behaviour)
            await session.done.wait()
            assert (session.outcome, session.received.text) == ("finished", session.expected.text)
            encoded.append(engine.engine.statistics()["encode"]["items_encoded"] - before)
            answers.append(session.received.text)
    assert encoded == [4, 2, 3]
    assert len(set(answers)) == 3
