"""The command line: serve, install, run each client's checks, write the table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients import environments
from tests.clients.environments import CLIENTS, Client
from vsched.api.server import running_server
from vsched.checkpoint_tools import load_tools
from vsched.cli.demo_command import user_message
from vsched.config import load_config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONTEXT_TOKENS = 2048
SETTINGS = (
    f"generate.context_tokens={CONTEXT_TOKENS}",
    'generate.memory={use="pinned", tokens=16384}',
    "server.port=0",
)
ERROR_CHARACTERS_MAX = 200


@dataclass(frozen=True)
class Tried:
    """A client with its version, and the error of each check, empty if it passed."""

    client: str
    version: str
    errors: dict[str, str]


def read_errors(results: Path, trouble: str) -> dict[str, str]:
    """Return the checks in a script's results, and a failed one for a bad end or an empty file."""
    lines = results.read_text().splitlines() if results.exists() else []
    errors: dict[str, str] = {line["check"]: line["error"] for line in map(json.loads, lines)}
    if trouble or not errors:
        errors["end"] = trouble or "the script told of no check"
    return errors


def write_table(tried: Sequence[Tried]) -> str:
    """Return the table of clients, followed by the table of failures."""
    lines = ["| client | version | passed | failed |", "|---|---|---|---|"]
    for one in tried:
        passed = ", ".join(name for name, error in one.errors.items() if not error)
        failed = ", ".join(name for name, error in one.errors.items() if error)
        lines.append(f"| {one.client} | {one.version} | {passed} | {failed} |")
    failures = [
        f"| {one.client}: {name} | {_short(error)} |"
        for one in tried
        for name, error in one.errors.items()
        if error
    ]
    if failures:
        lines += ["", "| failed | error |", "|---|---|", *failures]
    return "\n".join(lines).replace("_", "\\_")


def _short(error: str) -> str:
    return " ".join(error.split())[:ERROR_CHARACTERS_MAX].replace("|", "\\|")


def parser() -> argparse.ArgumentParser:
    """Describe the options."""
    options = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    options.add_argument(
        "checkpoint", type=Path, help="folder written by `vsched make-checkpoint --smollm2`"
    )
    options.add_argument(
        "--cache", type=Path, default=Path("clients"), help="folder for environments and logs"
    )
    options.add_argument("--only", default="", help="names, or parts of names, separated by commas")
    options.add_argument("--set", action="append", default=[], help="a setting of both servers")
    options.add_argument(
        "--pip-arguments", default="", help="further arguments of pip, in one string"
    )
    return options


@contextlib.asynccontextmanager
async def serving(*settings: str) -> AsyncIterator[str]:
    """Serve a checkpoint; yield the address."""
    config = load_config(None, sets=[*SETTINGS, *settings], environ={}).config
    async with running_server(config) as server:
        yield f"{server.url}/v1"


def picture(file: Path) -> dict[str, str]:
    """Write a picture that the demo model has not seen; return its variables for the scripts."""
    plugin = load_tools("transformers", "exam_tasks")
    (turn,) = plugin.exam(plugin.exam_tasks()[0], 1)[0][:1]
    file.write_bytes(turn.images[0])
    (image, *_) = user_message(turn)["content"]
    return {
        "VSCHED_PICTURE": str(file),
        "VSCHED_PICTURE_QUESTION": turn.question,
        "VSCHED_PICTURE_ANSWER": turn.answer,
        "VSCHED_PICTURE_URL": image["image_url"]["url"],
    }


async def run(clients: Sequence[Client], options: argparse.Namespace) -> list[Tried]:
    """Try clients one after the other, against servers of both checkpoints."""
    tools = HERE / "smollm2-tools.jinja"
    text = (
        f"model.path={options.checkpoint}",
        "model.name=smollm2",
        f"model.chat_template={tools}",
    )
    vision = (f"model.path={ROOT / 'workers' / 'demo-model'}", "model.name=demo")
    with tempfile.TemporaryDirectory(prefix="vsched-clients-") as folder:
        given = picture(Path(folder) / "picture.png")
        async with (
            serving(*text, *options.set) as text_url,
            serving(*vision, *options.set) as vision_url,
        ):
            given |= {
                "VSCHED_TEXT_URL": text_url,
                "VSCHED_TEXT_CHECKPOINT": str(options.checkpoint.absolute()),
                "VSCHED_TEXT_CONTEXT": str(CONTEXT_TOKENS),
                "VSCHED_VISION_URL": vision_url,
                "PYTHONPATH": str(ROOT),
            }
            return [await try_one(client, options, given) for client in clients]


async def try_one(client: Client, options: argparse.Namespace, given: dict[str, str]) -> Tried:
    """Install a client and run its checks."""
    print(f"{client.name} …", file=sys.stderr, flush=True)
    place = environments.Place(client, options.cache.absolute())
    try:
        await asyncio.to_thread(environments.install, place, options.pip_arguments.split())
    except environments.NotInstalled as error:
        return Tried(client.name, "", {"install": str(error)})
    place.results.unlink(missing_ok=True)
    with place.log.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *place.command(HERE), env=os.environ | given, stdout=log, stderr=log
        )
        try:
            async with asyncio.timeout(client.limit_s):
                status = f"status {await process.wait()}"
        except TimeoutError:
            process.kill()
            await process.wait()
            status = f"nothing more after {client.limit_s:.0f} s"
    errors = read_errors(place.results, "" if status == "status 0" else status)
    return Tried(client.name, await asyncio.to_thread(environments.version, place), errors)


def main() -> None:
    """Run the command; status 1 if a check failed."""
    options = parser().parse_args()
    wanted = [part for part in options.only.split(",") if part]
    clients = [
        client for client in CLIENTS if not wanted or any(part in client.name for part in wanted)
    ]
    tried = asyncio.run(run(clients, options))
    print(write_table(tried))
    sys.exit(any(any(one.errors.values()) for one in tried))


if __name__ == "__main__":
    main()
