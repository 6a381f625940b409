"""The policy that docs/first-policy.md develops runs in `vsched serve` with its configuration."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.serving import ServeProcess
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="package")

PAGE = Path(__file__).parents[2] / "docs" / "first-policy.md"
SEAT = 'seat="generate.admission"'


def from_the_page(before: str) -> str:
    """Return the first block after some words."""
    text = PAGE.read_text()
    found = re.compile(r"```\w*\n(.*?)```", re.DOTALL).search(text, text.index(before))
    assert found is not None
    return found[1]


def ask(url: str, body: dict[str, object] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer: str = response.read().decode()
        return answer


@pytest.mark.slow
@pytest.mark.thorough  # docs run the policy, and test_unseen_policy.py has policies of a configuration
async def test_the_adaptive_example_serves_by_configuration(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "steady_tokens.py").write_text(from_the_page("<!-- runnable: steady_tokens.py -->"))
    (tmp_path / "steady.toml").write_text(
        from_the_page("The same configuration, here `steady.toml`")
    )
    with ServeProcess(checkpoints("nano25"), "--config", "steady.toml", folder=tmp_path) as server:
        url = await asyncio.to_thread(lambda: server.url)
        body: dict[str, object] = {"prompt": "1 2 3", "max_tokens": 8, "ignore_eos": True}
        many = [asyncio.to_thread(ask, f"{url}/v1/completions", body) for _ in range(6)]
        choices = [json.loads(text) for text in await asyncio.gather(*many)]
        assert [one["usage"]["completion_tokens"] for one in choices] == [8] * 6
        metrics = await asyncio.to_thread(ask, f"{url}/metrics")
    counted = re.search(rf"vsched_policy_call_seconds_count{{[^}}]*{SEAT}}} (\S+)", metrics)
    assert counted is not None
    assert float(counted[1]) >= 2
    assert re.search(rf"vsched_policy_replaced{{[^}}]*{SEAT}}} 0.0", metrics)
    assert 'policy="SteadyTokens"' not in metrics
