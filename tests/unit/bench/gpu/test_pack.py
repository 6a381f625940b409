"""The package for a machine without a network: all modules that vsched imports there, in known versions."""

from __future__ import annotations

import re
import tomllib

from tests.bench.gpu.pack import NEEDED, ROOT, pins

THERE = {"huggingface-hub", "jinja2", "numpy", "safetensors", "tokenizers", "torch", "transformers"}
COMPILES_FOR_CPUS = {"numba"}


def test_all_that_vsched_depends_on_is_carried_or_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["workers"]]
    names = {re.split(r"[\[<>=~ ]", each)[0].lower() for each in wanted}
    assert names <= {name.lower() for name in NEEDED} | THERE | COMPILES_FOR_CPUS


def test_versions_are_those_of_the_constraints() -> None:
    assert {name.lower() for name in NEEDED} <= pins().keys()
