"""lm-eval with `local-completions`: a generated multiple-choice task."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.clients import asked

CHOICES = ("Paris", "London", "Rome", "Madrid")
COUNTRIES = ("France", "England", "Italy", "Spain")
TASK = """\
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
"""


def evaluate(folder: Path) -> dict[str, Any]:
    """Run the task; return its results."""
    file = folder / "capitals.jsonl"
    lines = [
        {"country": country, "choices": CHOICES, "answer": number}
        for number, country in enumerate(COUNTRIES)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "capitals.yaml").write_text(TASK.format(file=file))
    arguments = f"model={asked.MODEL},base_url={asked.URL}/completions,tokenizer={asked.CHECKPOINT}"
    asked.run(
        *("lm_eval", "run", "--model", "local-completions"),
        *("--tasks", "capitals", "--include_path", str(folder), "--batch_size", "4"),
        *("--model_args", f"{arguments},tokenized_requests=True"),
        *("--output_path", str(folder / "results.json")),
        HF_HOME=str(folder / "hub"),
    )
    (results,) = folder.glob("results*.json")
    found: dict[str, Any] = json.loads(results.read_text())["results"]["capitals"]
    return found


def check_multiple_choice() -> None:
    with tempfile.TemporaryDirectory(prefix="vsched-lm-eval-") as folder:
        found = evaluate(Path(folder))
    assert found["acc,none"] == 1.0, found
