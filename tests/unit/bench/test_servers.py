"""Servers of peers, lines that the bench of starts reads in a log, and busy loops next to a server."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tests.bench.servers import llamacpp, openvino_server, sides
from tests.bench.servers.peers import PEERS, PeerStart
from tests.bench.servers.processes import identities, neighbours
from vsched.errors import ConfigError


def write_config(folder: Path, **more: Any) -> None:
    content = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    content = {**content, "hidden_size": 32, **more}
    (folder / "config.json").write_bytes(msgspec.json.encode(content))


class Maker:
    """Replaces subprocess.run: records each command, and creates its output."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        (part,) = (word for word in command if word.endswith(".part"))
        Path(part).touch()
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    result = Maker()
    monkeypatch.setattr(subprocess, "run", result)
    return result


def spec_command(name: str, checkpoint: Path, folder: Path) -> str:
    sizes = sides.ServerSizes(threads=2, slots=4, context=512, kv_bytes=3 << 30)
    start = PeerStart(checkpoint=checkpoint, sizes=sizes, folder=folder)
    return " ".join(PEERS[name].spec(start).command)


def llamacpp_folder(tmp_path: Path) -> Path:
    binary = tmp_path / "llamacpp" / "build" / "bin" / llamacpp.TARGET
    binary.parent.mkdir(parents=True)
    binary.touch()
    return tmp_path / "llamacpp"


def source_in(folder: Path) -> Path:
    source = folder / "sdist" / "x" / "vendor" / "llama.cpp"
    source.mkdir(parents=True)
    return source


def test_types_of_llamacpp_are_made_of_one_conversion_and_share_the_tower(
    tmp_path: Path, maker: Maker
) -> None:
    checkpoint, folder = tmp_path / "model", llamacpp_folder(tmp_path)
    checkpoint.mkdir()
    write_config(checkpoint, vision_config={})
    source_in(folder)
    (folder / "build" / "bin" / llamacpp.QUANTIZE).touch()
    for name in ("llamacpp", "llamacpp-q8_0", "llamacpp-q4_0"):
        prepare = PEERS[name].prepare
        assert prepare is not None
        prepare(folder, checkpoint)
    text, tower, eight, four = maker.commands
    assert "--mmproj" in tower
    assert "--mmproj" not in text
    base = str(llamacpp.model_of(folder, checkpoint))
    assert (eight[1], eight[-1]) == (base, "Q8_0")
    assert (four[1], four[-1]) == (base, "Q4_0")
    for name, weights in (("llamacpp", "bf16"), ("llamacpp-q4_0", "q4_0")):
        command = spec_command(name, checkpoint, folder)
        assert str(llamacpp.model_of(folder, checkpoint, weights)) in command
        assert str(llamacpp.model_of(folder, checkpoint, llamacpp.TOWER)) in command
    write_config(checkpoint)
    assert "--mmproj" not in spec_command("llamacpp", checkpoint, folder)


def test_openvino_exports_what_the_checkpoint_is_and_serves_that(
    tmp_path: Path, maker: Maker
) -> None:
    checkpoint, folder = tmp_path / "model", tmp_path / "openvino"
    checkpoint.mkdir()
    packages = folder / "lib" / "python3.11" / "site-packages"
    (packages / "openvino_genai-2026.4.1.0.dist-info").mkdir(parents=True)
    kinds: tuple[dict[str, Any], ...] = ({}, {"vision_config": {}})
    for more in kinds:
        write_config(checkpoint, **more)
        prepare = PEERS["openvino-int8"].prepare
        assert prepare is not None
        prepare(folder, checkpoint)
    texts = [" ".join(command) for command in maker.commands]
    assert ["image-text-to-text" in text for text in texts] == [False, True]
    assert all("--weight-format int8" in text for text in texts)
    command = spec_command("openvino-int8", checkpoint, folder)
    assert maker.commands[-1][-1].removesuffix(".part") in command
    for part in ("--threads 2", "--slots 4", "--cache-gib 3", " -P "):
        assert part in command, "and no module beside the program is taken for one of the peer"


def test_a_conversion_that_fails_leaves_nothing_to_be_taken_for_a_model(tmp_path: Path) -> None:
    checkpoint, folder = tmp_path / "model", llamacpp_folder(tmp_path)
    checkpoint.mkdir()
    (source_in(folder) / "convert_hf_to_gguf.py").write_text("raise SystemExit('no such model')")
    with pytest.raises(ConfigError, match="no such model"):
        llamacpp.convert_when_missing("bf16", folder, checkpoint)
    assert not llamacpp.model_of(folder, checkpoint).exists()


class Pipe:
    """Counts concurrent writers, and ends each request at once."""

    def __init__(self, front: openvino_server.Front) -> None:
        self.front, self.loop = front, asyncio.get_running_loop()
        self.writing = self.most = 0

    def send(self, request: dict[str, Any]) -> None:
        self.writing += 1
        self.most = max(self.most, self.writing)
        time.sleep(0.002)
        self.writing -= 1
        stream = self.front._streams[request["id"]]
        for said in (("prompt", 3), ("end", None)):
            self.loop.call_soon_threadsafe(stream.put_nowait, said)


class Writer:
    """Keeps written bytes."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        pass


async def test_requests_of_several_clients_are_written_one_by_one() -> None:
    """Writes of several threads would interleave in the pipe and break the pipeline."""
    front = object.__new__(openvino_server.Front)
    front.sees, front._names, front._streams = False, itertools.count(), {}
    front._sending = asyncio.Lock()
    pipe = Pipe(front)
    front._pipe = cast("Any", pipe)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    writers = [Writer() for _ in range(4)]
    await asyncio.gather(*(front._chat(body, cast("Any", each)) for each in writers))
    assert pipe.most == 1
    for each in writers:
        assert b'"usage": {"prompt_tokens": 3, "completion_tokens": 0}' in each.written
        assert each.written.endswith(b"0\r\n\r\n")
    assert not front._streams


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
