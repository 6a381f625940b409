"""The command line: fetch, run file by file, write the table."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.vllm_suite import reasons, source, table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDERS = ("openai", "serve", "anthropic", "multimodal/openai")


def parser() -> argparse.ArgumentParser:
    """Describe the options."""
    options = argparse.ArgumentParser(prog="python -m tests.vllm_suite", description=__doc__)
    options.add_argument(
        "--python", type=Path, required=True, help="Python of an environment with vLLM"
    )
    options.add_argument("--text", type=Path, required=True, help="checkpoint for tests of text")
    options.add_argument(
        "--vision", type=Path, required=True, help="checkpoint for tests with images"
    )
    options.add_argument(
        "--cache", type=Path, default=Path("vllm-suite"), help="folder for sources and results"
    )
    options.add_argument("--version", default="0.32.0", help="version of vLLM whose tests are run")
    options.add_argument(
        "--files", default="", help="only files whose path contains one of these, by commas"
    )
    options.add_argument("--limit", type=float, default=300.0, help="seconds a file may take")
    options.add_argument("--again", action="store_true", help="run files that have results again")
    options.add_argument(
        "--report-only", action="store_true", help="write the table of the results there are"
    )
    return options


def run(file: Path, options: argparse.Namespace, tests: Path, path: Path) -> list[table.Outcome]:
    """Run one file of tests in a process of its own."""
    config = json.loads((options.text / "config.json").read_text())
    settings = {
        "text": str(options.text.absolute()),
        "vision": str(options.vision.absolute()),
        "context": config.get("max_position_embeddings", 2048),
        "vocabulary": config.get("vocab_size", 1),
        "command": [sys.executable, "-m", "vsched", "serve"],
        "arguments": [
            word for key in ("generate", "encode") for word in ("--set", f"{key}.threads=1")
        ],
        "environment": {
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "policies", "workers"))
        },
    }
    report = options.cache.absolute() / "report.xml"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "VSCHED_SUITE": json.dumps(settings),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    paths = [str(path), str(options.cache.absolute() / "shim"), str(tests.parent)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [
        str(options.python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "vllm_suite.shim",
        f"--junitxml={report}",
    ]
    command += ["--timeout=60", "--asyncio-mode=auto", "-p", "no:cacheprovider", str(file)]
    with (options.cache / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=tests.parent, env=environment, stdout=log, stderr=log
        )
        try:
            process.wait(options.limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
    if not report.exists():
        return [table.Outcome("all", "failed", f"no report within {options.limit:.0f} s")]
    return table.read(report.read_text())


def main() -> None:
    """Run the suite."""
    options = parser().parse_args()
    tests = source.fetch(options.cache, options.version).absolute() / "tests"
    path = source.packages(options.cache, options.python).absolute()
    shutil.copytree(HERE, options.cache / "shim" / "vllm_suite", dirs_exist_ok=True)
    where = options.cache / "results.json"
    results = table.kept(where)
    for folder in FOLDERS:
        for file in sorted((tests / "entrypoints" / folder).rglob("test_*.py")):
            name = str(file.relative_to(tests / "entrypoints"))
            conftest = file.parent / "conftest.py"
            fixtures = conftest.read_text() if conftest.exists() else ""
            text = file.read_text()
            if not reasons.starts_server(text, fixtures):
                found = [table.Outcome("all", "not applicable", reasons.INTERNALS)] * text.count(
                    "def test_"
                )
            elif reason := reasons.by_test(name):
                found = [table.Outcome("all", "not applicable", reason)] * text.count("def test_")
            elif (
                options.report_only
                or (name in results and not options.again)
                or (options.files and not any(part in name for part in options.files.split(",")))
            ):
                continue
            else:
                begin = time.monotonic()
                found = run(file, options, tests, path)
                print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
            results[name] = found
            table.keep(where, results)
    print(table.write(results))


if __name__ == "__main__":
    main()
