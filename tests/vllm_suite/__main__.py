"""The command line: fetch, run the files that use a server, write the table."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.vllm_suite import adapter, reasons, shim, source, table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = "tests/entrypoints/"
TEST_S, ALL_S = 300.0, 7200.0
"""Maximum seconds of a test, with its server, and of all tests."""
FOLDERS = ("openai", "serve", "anthropic", "multimodal/openai")


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m tests.vllm_suite", description=__doc__)
    add = options.add_argument
    add("--text", type=Path, required=True, help="checkpoint for tests of text: SmolLM2")
    add("--vision", type=Path, required=True, help="checkpoint for tests with images")
    add("--cache", type=Path, default=Path("vllm-suite"), help="folder for sources and results")
    add("--version", default="0.32.0", help="version of vLLM whose tests are run")
    add("--files", default="", help="only files whose path contains one of these, by commas")
    add("--context", type=int, default=16384, help="longest context that a test gets")
    add("--report-only", action="store_true", help="write the table of the results there are")
    return options


def prepared(checkpoint: Path, cache: Path, context: int) -> Path:
    """Return the checkpoint as tests expect it: with this context, and a template that shows tools.

    Its other files are links.
    """
    folder = cache / "text"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.name not in {"config.json", "chat_template.jinja"}:
            (folder / file.name).symlink_to(file.absolute())
    shutil.copy(HERE / "tools.jinja", folder / "chat_template.jinja")
    config = json.loads((checkpoint / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(files: list[str], options: argparse.Namespace, sources: Path) -> None:
    """Run files of tests in a process of vLLM's environment; the shim writes the results."""
    cache = options.cache.absolute()
    python = source.environment(cache, sources)
    text = prepared(options.text, cache, options.context)
    config = json.loads((text / "config.json").read_text())
    settings = {
        "text": str(text),
        "vision": str(options.vision.absolute()),
        "adapter": str(adapter.make(cache / "adapter", text)),
        "context": options.context,
        "vocabulary": config.get("text_config", config)["vocab_size"],
        "report": str(cache / "report.jsonl"),
        "command": [sys.executable, "-m", "vsched", "serve"],
        "arguments": ["--set", "model.dtype=float32"],
        "environment": {
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "policies", "workers"))
        },
    }
    shutil.copytree(HERE, cache / "shim" / "vllm_suite", dirs_exist_ok=True)
    environment = (
        os.environ
        | {
            "VSCHED_SUITE": json.dumps(settings),
            "VSCHED_SUITE_PORT": str(shim.free_port()),
            "PYTHONPATH": os.pathsep.join([str(cache / "shim"), str(sources)]),
            "HF_HUB_OFFLINE": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plug-ins of vsched's own environment are visible, too
            "OMP_NUM_THREADS": "1",
        }
    )
    command = [str(python), "-m", "pytest", "-v"]
    for plugin in ("pytest_asyncio.plugin", "pytest_timeout", "vllm_suite.shim"):
        command += ["-p", plugin]
    command += ["--asyncio-mode=auto", "--tb=short", "-p", "no:cacheprovider"]
    command += [f"--timeout={TEST_S:g}", "--continue-on-collection-errors"]
    command += [f"--rootdir={sources}", *files]
    with (cache / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, cwd=sources, env=environment, stdout=log, stderr=log)
        try:
            process.wait(ALL_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that its servers end with it
            process.wait()


def main() -> None:
    options = parser().parse_args()
    sources = source.fetch(options.cache, options.version).resolve()
    report = options.cache / "report.jsonl"
    wanted = options.files.split(",")
    internal: dict[str, list[table.Outcome]] = {}
    files: list[str] = []
    for folder in FOLDERS:
        for path in sorted((sources / TESTS / folder).rglob("test_*.py")):
            name, text = str(path.relative_to(sources)), path.read_text()
            conftest = path.parent / "conftest.py"
            if reasons.starts_server(text, conftest.read_text() if conftest.exists() else ""):
                files.append(name)
            else:
                count = text.count("def test_")
                internal[name] = [table.Outcome("all", "not applicable", reasons.INTERNALS)] * count
    found = table.read(report.read_text().splitlines()) if report.exists() else {}
    chosen = [name for name in files if name not in found and any(part in name for part in wanted)]
    if chosen and not options.report_only:
        run(chosen, options, sources)
        found = table.read(report.read_text().splitlines()) if report.exists() else {}
    judged = {
        name: [table.judge(name, one) for one in found[name]] for name in files if name in found
    }
    results = internal | judged
    print(table.write({name.removeprefix(TESTS): results[name] for name in results}))
    if missing := [name for name in files if name not in found]:
        print("not run yet:", *missing, file=sys.stderr)


if __name__ == "__main__":
    main()
