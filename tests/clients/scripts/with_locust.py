"""locust: users that stream chats for some seconds, from a locustfile of its own."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

from tests.clients import asked

LOAD = f"""
import json
from locust import HttpUser, between, task

class Chatter(HttpUser):
    wait_time = between(0.1, 0.5)

    @task
    def ask(self):
        body = {{
            "model": {asked.MODEL!r},
            "messages": [{{"role": "user", "content": "Hi"}}],
            "max_tokens": 8,
            "stream": True,
        }}
        with self.client.post("/chat/completions", json=body, stream=True, catch_response=True) as reply:
            events = [line[6:] for line in reply.iter_lines() if line.startswith(b"data: ")]
            if reply.status_code != 200 or events[-1] != b"[DONE]":
                reply.failure("the stream did not end")
"""


def check_streams() -> None:
    with tempfile.TemporaryDirectory(prefix="vsched-locust-") as folder:
        file = Path(folder) / "load.py"
        file.write_text(LOAD)
        asked.run(
            *("locust", "-f", str(file), "--headless", "--csv", f"{folder}/run"),
            *("-H", asked.URL, "-u", "4", "-r", "4", "-t", "10s", "--stop-timeout", "60s"),
        )
        with (Path(folder) / "run_stats.csv").open() as table:
            total = next(row for row in csv.DictReader(table) if row["Name"] == "Aggregated")
    assert int(total["Request Count"]) >= 4, total
    assert int(total["Failure Count"]) == 0, total
