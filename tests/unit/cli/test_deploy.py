"""What `deploy/` says: its files are read, and what they name is there. Nothing is built, which needs a daemon."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from vsched.cli import app, main
from vsched.config import load_config

ROOT = Path(__file__).resolve().parents[3]
INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "RUN", "USER", "WORKDIR",
}  # fmt: skip


def dockerfile() -> list[tuple[str, str]]:
    """Return each instruction with its arguments, in one line."""
    text = (ROOT / "deploy/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines()]


def of(instruction: str) -> list[str]:
    return [arguments for name, arguments in dockerfile() if name == instruction]


def service() -> dict[str, Any]:
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    found: dict[str, Any] = services["vsched"]
    return found


def test_dockerfile_is_read_and_copies_what_is_there() -> None:
    assert {name for name, _ in dockerfile()} <= INSTRUCTIONS
    for sources in of("COPY"):
        *names, _ = sources.split()
        assert all((ROOT / name).exists() for name in names), names


def test_dockerfile_copies_all_packages_and_installs_an_extra_that_there_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = " ".join(of("COPY")).split()
    assert {package.split("/")[0] for package in packages} <= {*copied}
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= {*copied}
    (extra,) = re.findall(r"\.\[(\w+)\]", " ".join(of("RUN")))
    assert extra in project["project"]["optional-dependencies"]


def test_dockerfile_serves_as_nobody_in_particular() -> None:
    """The last user is not root, and comes before the command."""
    names = [name for name, _ in dockerfile()]
    assert of("USER") == ["vsched"]
    assert names.index("USER") < names.index("ENTRYPOINT")


@pytest.mark.parametrize("words", [json.loads(of("CMD")[0]), service()["command"]])
def test_command_of_the_image_is_understood(
    words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its options are those of `vsched serve`: it goes on until it looks for the checkpoint."""
    main.import_commands()
    assert json.loads(of("ENTRYPOINT")[0]) == ["vsched"]
    CliRunner().invoke(app, words)
    assert "checkpoint 'model' does not exist" in caplog.text


def test_compose_sets_what_the_configuration_knows_and_mounts_the_model() -> None:
    """A key that was renamed is found here, and not by whoever starts the container."""
    found = service()
    environment = {name: str(value) for name, value in found["environment"].items()}
    config = load_config(None, sets=[], environ=environment).config
    assert config.server.api_key_variable in environment
    assert any(volume.endswith(f":{found['command'][1]}:ro") for volume in found["volumes"])
    (kept,) = (volume.partition(":")[2] for volume in found["volumes"] if "compiled" in volume)
    assert f"NUMBA_CACHE_DIR={kept}/numba" in of("ENV")
    assert (ROOT / found["build"]["dockerfile"]).is_file()
    assert f":{config.server.port}" in found["healthcheck"]["test"][-1]
    assert found["ports"] == [f"127.0.0.1:{config.server.port}:{of('EXPOSE')[0]}"]
