"""The Grafana dashboard, the alerts, and vLLM's dashboard read metrics that the server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from vsched.api import ApiSettings, create_app
from vsched.sim.cluster import SimEngine
from vsched.sim.network.asgi_client import AsgiClient

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
RULES = DEPLOY / "prometheus-rules.yaml"
BODY = {"prompt": "1 2 3", "max_tokens": 4, "ignore_eos": True}
VLLM_PANELS = (
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count", "prompt_tokens_total", "generation_tokens_total",
    "inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum", "num_requests_running",
    "num_requests_waiting", "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_count", "kv_cache_usage_perc", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_success_total", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
)  # fmt: skip
"""Series of vLLM's dashboard, examples/observability/prometheus_grafana/grafana.json."""
LATE = {
    "vsched_group_losses_total", "vsched_policy_faults_total", "vsched_policy_overruled_total",
    "vsched_requests_refused_total", "vsched_tenant_tokens_total",
}  # fmt: skip
"""Series that begin with the first loss, fault, refusal or tenant; `families` has them nevertheless."""


async def scraped(*, vllm_metrics: bool = False) -> str:
    """Return the metrics after a request."""
    async with SimEngine() as simulated:
        settings = ApiSettings(vllm_metrics=vllm_metrics)
        client = AsgiClient(create_app(simulated.engine, settings))
        await client.request("POST", "/v1/completions", json=BODY)
        return (await client.request("GET", "/metrics")).body.decode()


def series(text: str) -> dict[str, set[str]]:
    """Labels of each series, by its name."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def check(expression: str, found: dict[str, set[str]]) -> None:
    """Assert that the metrics of a query exist, with the labels that it selects."""
    used = re.findall(r"\b(vsched_\w+)(?:\{([^}]*)\})?", expression)
    assert used, expression
    for name, selectors in used:
        labels = set(re.findall(r"(\w+)\s*[=!]", selectors))
        if name in LATE:
            continue
        assert name in found, f"{name} in {expression}"
        assert labels <= found[name], f"{labels} of {name} in {expression}"


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@pytest.mark.sim
async def test_dashboard_and_alerts_read_metrics_that_exist() -> None:
    text = await scraped()
    found = series(text)
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    for expression in (*queries, *(alert["expr"] for alert in alerts())):
        check(expression, found)
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert families >= LATE
    # Creation times double the number of series, and cannot be summed over processes.
    assert not [name for name in found if name.endswith("_created")]
    assert all("model_name" in labels for labels in found.values())
    assert not [name for name in found if name.startswith("vllm:")]


@pytest.mark.sim
async def test_vllm_dashboard_reads_aliases_if_they_are_set() -> None:
    found = series(await scraped(vllm_metrics=True))
    for name in VLLM_PANELS:
        assert "model_name" in found[f"vllm:{name}"], name


FIRING = {
    "VschedGroupDown": [('vsched_group_up{group="generate",model_name="m"}', "0x30")],
    "VschedGroupLost": [
        ('vsched_group_losses_total{group="generate",model_name="m",reason="RankSilent"}', "_x10 1x20")
    ],
    "VschedOverloaded": [('vsched_arrivals_total{model_name="m",outcome="shed"}', "0+5x30")],
    "VschedQueueLong": [
        ('vsched_num_requests_waiting{model_name="m"}', "9x30"),
        ('vsched_slots{group="generate",model_name="m"}', "4x30"),
    ],
    "VschedFirstTokenSlow": [
        (f'vsched_time_to_first_token_seconds_bucket{{le="{bound}",model_name="m"}}', f"0+{count}x30")
        for bound, count in (("10.0", 1), ("30.0", 9), ("+Inf", 9))
    ],
    "VschedKvCacheSmall": [
        ('vsched_num_preemptions_total{group="generate",model_name="m"}', "0+3x30"),
        ('vsched_requests_admitted_total{group="generate",model_name="m"}', "0+9x30"),
    ],
    "VschedMemoryMarginLow": [('vsched_memory_unclaimed_bytes{model_name="m",pool="cpu"}', "-1x30")],
    "VschedPolicyFaults": [
        ('vsched_policy_faults_total{model_name="m",policy="generate.step"}', "_x10 2x20")
    ],
    "VschedPolicyReplaced": [
        ('vsched_policy_replaced{model_name="m",seat="generate.step"}', "0x10 1x20")
    ],
}  # fmt: skip
"""Series of 30 minutes in which each alert fires at the 20th."""


def test_alerts_have_a_series_in_which_they_fire() -> None:
    assert [alert["alert"] for alert in alerts()] == list(FIRING)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_in_promtool(tmp_path: Path) -> None:
    """Each in its own series, and no other."""
    once = {"eval_time": "20m", "exp_samples": [{"labels": "{}", "value": 1}]}
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in inputs],
            "promql_expr_test": [
                {"expr": f'count(ALERTS{{alertstate="firing"{more}}})', **once}
                for more in (f',alertname="{name}"', "")
            ],
        }
        for name, inputs in FIRING.items()
    ]
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
