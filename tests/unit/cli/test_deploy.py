"""The files in `deploy/` parse, and the paths and keys in them exist. CI builds the images, which needs a daemon."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.each_case import each_case
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


def dict_of_arguments() -> dict[str, str]:
    """Build arguments and their defaults."""
    return dict(argument.split("=", 1) for argument in of("ARG"))


def on_kubernetes() -> dict[str, dict[str, Any]]:
    """Return the objects of the example, by kind."""
    documents = yaml.safe_load_all((ROOT / "deploy/kuberay.yaml").read_text())
    return {document["kind"]: document for document in documents}


def service() -> dict[str, Any]:
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    found: dict[str, Any] = services["vsched"]
    return found


def test_dockerfile_copies_existing_files_and_serves_as_an_unprivileged_user() -> None:
    """The user is a number, which Kubernetes wants for `runAsNonRoot`, and comes before the command."""
    names = [name for name, _ in dockerfile()]
    assert {*names} <= INSTRUCTIONS
    for sources in of("COPY"):
        *copied, _ = sources.split()
        assert all((ROOT / name).exists() for name in copied), copied
    (user,) = of("USER")
    assert int(user)
    assert f"--uid {user} vsched" in " ".join(of("RUN"))
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_dockerfile_copies_all_packages_and_installs_an_extra_that_there_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = " ".join(of("COPY")).split()
    assert {package.split("/")[0] for package in packages} <= {*copied}
    texts = [project["project"]["readme"], *project["project"]["license-files"]]
    assert {text.split("/")[0] for text in texts} <= {*copied}
    assert '".[${EXTRAS}]"' in " ".join(of("RUN"))
    built = (ROOT / "deploy/kuberay.yaml").read_text() + f"EXTRAS={dict_of_arguments()['EXTRAS']} "
    extras = re.findall(r"EXTRAS=([\w,-]+) ", built)
    assert len(extras) == 2
    for extra in ",".join(extras).split(","):
        assert extra in project["project"]["optional-dependencies"]


def entrypoint() -> list[str]:
    """Return the command of Ray's job, without the program and with a local configuration."""
    words = shlex.split(on_kubernetes()["RayJob"]["spec"]["entrypoint"])
    assert words.pop(0) == "vsched"
    at = words.index("--config")
    return words[:at] + words[at + 2 :]


@each_case("words", [json.loads(of("CMD")[0]), service()["command"], entrypoint()])
def test_image_command_is_understood(words: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """The command line is valid: `vsched serve` stops only because the checkpoint is missing."""
    main.import_commands()
    assert json.loads(of("ENTRYPOINT")[0]) == ["vsched"]
    caplog.clear()
    CliRunner().invoke(app, words)
    assert "checkpoint 'model' does not exist" in caplog.text


def test_compose_sets_known_keys_and_mounts_the_model() -> None:
    """A renamed key fails this test, not the start of a container."""
    found = service()
    environment = {name: str(value) for name, value in found["environment"].items()}
    config = load_config(None, sets=[], environ=environment).config
    assert config.server.api_key_variable in environment
    assert any(volume.endswith(f":{found['command'][1]}:ro") for volume in found["volumes"])
    (kept,) = (volume.partition(":")[2] for volume in found["volumes"] if "compiled" in volume)
    for name in ("numba", "triton"):
        assert f"{name.upper()}_CACHE_DIR={kept}/{name}" in of("ENV")
    assert (ROOT / found["build"]["dockerfile"]).is_file()
    assert f":{config.server.port}" in found["healthcheck"]["test"][-1]
    assert found["ports"] == [f"127.0.0.1:{config.server.port}:{of('EXPOSE')[0]}"]


def test_kubernetes_has_nodes_for_the_replicas_that_its_configuration_wants(tmp_path: Path) -> None:
    """Each replica's bundle fits a node of its own, which has the resource that only its stage requests."""
    written = tmp_path / "vsched.toml"
    written.write_text(on_kubernetes()["ConfigMap"]["data"]["vsched.toml"])
    config = load_config(written, sets=[], environ={}).config
    groups = on_kubernetes()["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    nodes = {group["groupName"]: group for group in groups}
    stages = {"encode": config.encode.replicas, "generate": config.generate.replicas}
    assert {name: group["replicas"] for name, group in nodes.items()} == stages
    assert len(config.on_ray) == sum(stages.values())
    for (stage, _), resources in config.on_ray.items():
        start = nodes[stage]["rayStartParams"]
        has = json.loads(json.loads(start["resources"])) | {"CPU": int(start["num-cpus"])}
        assert resources == has
        (container,) = nodes[stage]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["cpu"] == start["num-cpus"]


def test_kubernetes_engine_has_its_key_its_model_and_its_port() -> None:
    found = on_kubernetes()
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    config = tomllib.loads(found["ConfigMap"]["data"]["vsched.toml"])
    assert config["server"]["api_key_variable"] in {variable["name"] for variable in head["env"]}
    words = shlex.split(found["RayJob"]["spec"]["entrypoint"])
    mounted = {mount["mountPath"] for mount in head["volumeMounts"]}
    assert {words[2], str(Path(words[words.index("--config") + 1]).parent)} <= mounted
    (port,) = found["Service"]["spec"]["ports"]
    assert port["targetPort"] in {port["containerPort"] for port in head["ports"]}
    assert str(port["targetPort"]) == of("EXPOSE")[0]
    labels = cluster["headGroupSpec"]["template"]["metadata"]["labels"]
    assert labels.items() <= found["Service"]["spec"]["selector"].items()
    # All nodes have one image, with Ray in the version of the constraints file.
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    (image,) = {group["template"]["spec"]["containers"][0]["image"] for group in groups}
    assert f"-t {image} " in (ROOT / "deploy/kuberay.yaml").read_text()


def test_compose_on_gpus_changes_the_service_and_its_image() -> None:
    changed = yaml.safe_load((ROOT / "deploy/compose.gpu.yaml").read_text())["services"]
    assert changed.keys() == {"vsched"}
    build = changed["vsched"]["build"]
    assert build["args"].keys() <= dict_of_arguments().keys()
    # Without the index of torch's CPU builds, pip installs the CUDA build.
    assert "/cpu" in dict_of_arguments()["TORCH_INDEX"]
    assert build["args"]["TORCH_INDEX"] == ""
    assert changed["vsched"]["image"] != service()["image"]
    (device,) = changed["vsched"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


@each_case("name", ["ci.yml", "release.yml"])
def test_workflow_builds_both_images(name: str) -> None:
    job = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())["jobs"]["image"]
    (step,) = (one["with"] for one in job["steps"] if "build-push" in one.get("uses", ""))
    assert (ROOT / step["file"]).is_file()
    argument, _, value = step["build-args"].partition("=")
    assert argument in dict_of_arguments()
    assert value == "${{ matrix.torch_index }}"
    indices = {one["torch_index"] for one in job["strategy"]["matrix"]["include"]}
    assert indices == {dict_of_arguments()["TORCH_INDEX"], ""}
