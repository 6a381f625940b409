"""Files about releases and the community agree with each other and with the repository."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"


def project() -> dict[str, Any]:
    read: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return read


def workflow(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    return read


def test_release_versions_agree() -> None:
    version = project()["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    released = dict(heading.split(" - ") for heading in headings[1:])
    assert released[version] == str(citation["date-released"])
    assert all(date.fromisoformat(day) for day in released.values())


def test_release_ci_runs_every_supported_python() -> None:
    names = [name.rpartition(" ")[2] for name in project()["classifiers"] if ":: 3." in name]
    assert workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python-version"] == names
    assert project()["requires-python"] == f">={names[0]}"


def test_release_workflow_builds_and_publishes_what_is_there() -> None:
    jobs = workflow("release.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"build", "image"}
    text = (WORKFLOWS / "release.yml").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", text)) <= targets
    assert (ROOT / re.findall(r"file: (\S+)", text)[0]).is_file()
