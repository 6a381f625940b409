"""Checkpoints named by a hub id or a GGUF file, with a server of the hub's API on loopback."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import threading
from collections import namedtuple
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest
from huggingface_hub import close_session

from vsched import checkpoint_tools, checkpoints
from vsched.checkpoint_tools import CheckpointTools
from vsched.checkpoints import (
    download,
    is_hub_id,
    local_checkpoint,
    vision_part,
    with_local_checkpoints,
)
from vsched.config import Config, load_config
from vsched.errors import CheckpointError

COMMIT = "a" * 40
NO_HEADERS: Mapping[str, str] = {}


REFUSALS = {
    "org/gated": (403, "GatedRepo"),
    "org/denied": (401, "Invalid credentials"),
    "org/busy": (429, ""),
    "org/broken": (503, ""),
}
"""Statuses and error codes of repositories that cannot be read."""


class HubServer(ThreadingHTTPServer):
    """Repositories by id, as folders.

    Attributes:
        token: Required access token; empty for none.
        requests: Method and path of each request so far.
        cut_at: Number of bytes after which the connection of a download from the first byte on is lost; 0 for none.
        ranges: First bytes of the downloads that began later in a file.
    """

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.token = ""
        self.requests: list[str] = []
        self.cut_at = 0
        self.ranges: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Write nothing to the test's output."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if path.startswith("/cdn/"):
            self._send_file(Path(path.removeprefix("/cdn")))
            return
        owner, name, *rest = path.removeprefix("/api/models").strip("/").split("/")
        kind, revision, *file_parts = rest or ["", "main"]
        repository = f"{owner}/{name}"
        if (refusal := self._refusal(repository, revision)) is not None:
            self._send(refusal[0], headers={"X-Error-Code": refusal[1]})
        elif kind == "resolve":
            self._redirect_to_file(self.server.repositories[repository].joinpath(*file_parts))
        else:
            self._list_files(repository, tree=kind == "tree")

    def _list_files(self, repository: str, *, tree: bool) -> None:
        folder = self.server.repositories[repository]
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = [{"rfilename": file.name} for file in files]
        content: Any = {"id": repository, "sha": COMMIT, "siblings": names}
        if tree:
            content = [
                {
                    "type": "file",
                    "path": str(file.relative_to(folder)),
                    "size": file.stat().st_size,
                    "oid": _etag(file),
                }
                for file in files
            ]
        self._send(200, json.dumps(content).encode())

    def _refusal(self, repository: str, revision: str) -> tuple[int, str] | None:
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return 401, "RepoNotFound"
        if repository in REFUSALS:
            return REFUSALS[repository]
        if repository not in self.server.repositories:
            return 404, "RepoNotFound"
        return None if revision in ("main", COMMIT) else (404, "RevisionNotFound")

    def _redirect_to_file(self, file: Path) -> None:
        if not file.is_file():
            self._send(404, headers={"X-Error-Code": "EntryNotFound"})
            return
        self._send(
            302,
            headers={
                "Location": f"http://localhost:{self.server.server_address[1]}/cdn{file}",
                "X-Repo-Commit": COMMIT,
                "X-Linked-Size": str(file.stat().st_size),
                "X-Linked-Etag": f'"{_etag(file)}"',
            },
        )

    def _send_file(self, file: Path) -> None:
        content, etag = file.read_bytes(), {"ETag": f'"{_etag(file)}"'}
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            self.server.ranges.append(start)
            there = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._send(206, content[start:], headers={**etag, "Content-Range": there})
        else:
            self._send(200, content, headers=etag, cut_at=self.server.cut_at)

    def _send(
        self,
        status: int,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        cut_at: int = 0,
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: cut_at or len(body)])
            self.close_connection = 0 < cut_at < len(body)


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.onnx": b"another format",
    "README.md": b"# Model",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name, content in FILES.items():
        file = tmp_path / "model" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt"):
        (tmp_path / "adapter" / name).write_bytes(b"{}")
    folders = {f"org/{name}": name for name in ("model", "pickles", "adapter")}
    server = HubServer({name: tmp_path / folder for name, folder in folders.items()})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in (
        ("ENDPOINT", server.url),
        ("HF_HUB_CACHE", str(tmp_path / "cache")),
        ("HUGGINGFACE_CO_URL_TEMPLATE", template),
        ("HF_HUB_OFFLINE", False),
    ):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    close_session()
    yield server
    close_session()
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_id_is_a_name_with_one_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen/Qwen2.5-VL-3B", "org/model@v1.0", "org/model:Q4_K_M", f"org/{300 * 'm'}"):
        assert is_hub_id(name)
    for name in ("", "model", "./org/model", "/org/model", "a/b/c", "../model"):
        assert not is_hub_id(name)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert not is_hub_id("org/model"), "a folder of this name is meant"


def test_download_takes_the_files_that_a_server_reads_and_once(
    hub: HubServer, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = download("org/model")
    assert capfd.readouterr() == ("", ""), "no bars among the lines of a log"
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.requests.clear()
    assert download("org/model") == folder
    assert not [one for one in hub.requests if "/cdn/" in one]


def test_download_goes_on_after_a_loss(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last piece that came, of 500 bytes here and 10 MB by default."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 500)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.cut_at = 1200
    folder = download("org/model")
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.ranges == [1000]


def test_configuration_gets_folders_and_clients_the_hub_id(hub: HubServer) -> None:
    config = load_config(
        None,
        sets=[
            "model.path=org/model@main",
            "generate.draft_model=org/model",
            'adapters.load={sql = "org/adapter"}',
            "adapters.count_max=1",
        ],
        environ={},
    ).config
    local = with_local_checkpoints(config)
    assert Path(local.model.path, "config.json").exists()
    assert local.model.served_name == "org/model"
    assert local.generate.draft_model == local.model.path
    adapter = Path(local.adapters.load["sql"])
    names = sorted(file.name for file in adapter.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    assert with_local_checkpoints(Config()) == Config()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("org/nothing", "neither a folder nor a repository at 127.0.0.1"),
        ("org/model@v2", "no such revision"),
        ("org/pickles", "no weights as safetensors, only"),
        ("org/model:Q4_K_M", "no GGUF file with 'Q4_K_M' in its name"),
        ("org/gated", "accepted its terms"),
        ("org/denied", r"401 .*Remedy: set HF_TOKEN to a token that is valid"),
        ("org/busy", r"127.0.0.1:\d+ failed: .*429 .*Remedy: wait, or set HF_TOKEN"),
        ("org/broken", r"127.0.0.1:\d+ failed: .*503 .*Remedy: run the same command again"),
    ],
)
def test_refusals_of_a_hub_are_one_sentence(hub: HubServer, name: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        download(name)
    assert "Remedy:" in str(error.value)
    assert "\n" not in str(error.value)


def test_reason_of_a_lost_download_ends_in_one_full_stop() -> None:
    error = checkpoints._in_a_sentence("org/model", ConnectionError("Server disconnected."))
    assert "failed: Server disconnected. Remedy: " in str(error)


def test_part_names_one_gguf_file(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a name is preferred, and the language model to its vision part, which is downloaded, too."""
    names = ("Q4_K", "Q4_K_M", "Q4_K_S", "Q8_0")
    files = [f"model-{part}.gguf" for part in names]
    for name in (*files, "mmproj-model-Q8_0.gguf", "Q4_0/model.gguf"):
        file = hub.repositories["org/model"] / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(name.encode())
    monkeypatch.setattr(checkpoints, "_converted", lambda file, *_, **__: file.read_text())
    with pytest.raises(CheckpointError, match=r"4 files have 'Q4' .*model-Q4_K_M.gguf.*Remedy"):
        local_checkpoint("org/model:Q4")
    folder = download("org/model:Q4_K")
    assert {file.name for file in folder.glob("*.gguf")} == {
        "model-Q4_K.gguf",
        "mmproj-model-Q8_0.gguf",
    }
    for part, name in {
        **dict(zip(names, files, strict=True)),
        "Q4_0": "Q4_0/model.gguf",
        "mmproj": "mmproj-model-Q8_0.gguf",
    }.items():
        assert local_checkpoint(f"org/model:{part}") == name
    assert (Path(local_checkpoint("org/model")) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("model", "files", "wanted"),
    [
        (
            "a-3B-Q4_K_M.gguf",
            ["mmproj-a-7B-f16.gguf", "mmproj-a-3B-f16.gguf"],
            "mmproj-a-3B-f16.gguf",
        ),
        ("a-Q8_0.gguf", ["mmproj-F32.gguf", "mmproj-BF16.gguf", "b.gguf"], "mmproj-BF16.gguf"),
        ("a-Q8_0.gguf", ["b.gguf", "parts/mmproj-F16.gguf"], None),
        ("a-Q8_0.gguf", ["MMPROJ-F16.gguf"], "MMPROJ-F16.gguf"),
    ],
)
def test_vision_part_is_the_most_similar_file_in_16_bits(
    tmp_path: Path, model: str, files: list[str], wanted: str | None
) -> None:
    """Only for architectures whose vision parts are read."""

    class Tools(CheckpointTools):
        def reads_mmproj(self, architecture: str) -> bool:
            return architecture == "vl"

    for name in (model, *files):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gguf_head("vl"))
    found = vision_part(tmp_path / model, Tools())
    assert found == (None if wanted is None else tmp_path / wanted)
    (tmp_path / model).write_bytes(gguf_head("text"))
    assert vision_part(tmp_path / model, Tools()) is None
    (tmp_path / model).write_bytes(gguf_head("vl")[:30])
    assert vision_part(tmp_path / model, Tools()) is None
    (tmp_path / model).write_bytes(gguf_head("clip"))
    with pytest.raises(CheckpointError, match=r"is the vision part of a model. Remedy: give the f"):
        vision_part(tmp_path / model, Tools())


def gguf_head(architecture: str) -> bytes:
    """Return the begin of a GGUF file, with its first setting."""
    key, value = b"general.architecture", architecture.encode()
    sizes = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key))
    return sizes + key + struct.pack("<IQ", 8, len(value)) + value


def test_gguf_file_in_several_parts_is_downloaded_and_named_whole(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model-Q6_K-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in (*names, "model-Q6_K_L.gguf", "mmproj-F16.gguf"):
        (hub.repositories["org/model"] / name).write_bytes(b"GGUF")
    converted: list[str] = []

    class Tools(CheckpointTools):
        def convert_gguf(self, file: str, path: str, **_: object) -> int:
            converted.append(Path(file).name)
            raise CheckpointError(Path(path).name)

    monkeypatch.setattr(checkpoint_tools, "load_tools", lambda *_: Tools())
    with pytest.raises(CheckpointError, match=r"^model-Q6_K-[0-9a-f]{16}$"):
        local_checkpoint("org/model:Q6_K")
    assert converted == names[:1]
    folder = download("org/model:Q6_K")
    assert {file.name for file in folder.glob("*.gguf")} == {*names, "mmproj-F16.gguf"}
    (folder / names[0]).unlink()
    with pytest.raises(CheckpointError, match=rf"one of 2 parts, and {names[0]} is missing. Rem"):
        local_checkpoint(str(folder / names[1]))


def test_gguf_file_that_cannot_be_converted_is_named_as_in_the_repository(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache has it under its digest."""

    class Tools(CheckpointTools):
        def convert_gguf(self, file: str, *_: object, **__: object) -> int:
            raise CheckpointError(f"{Path(file).name!r} cannot be converted")

    (hub.repositories["org/model"] / "model-Q8_0.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checkpoint_tools, "load_tools", lambda *_: Tools())
    with pytest.raises(CheckpointError, match=r"^'model-Q8_0\.gguf' cannot be converted"):
        local_checkpoint("org/model:Q8_0")


@pytest.mark.parametrize(("size", "quantized"), [(100, False), (356, True)])
def test_quantization_is_suggested_for_a_gguf_file_that_was_quantized(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    size: int,
    quantized: bool,
) -> None:
    class Tools(CheckpointTools):
        def convert_gguf(self, file: str, path: str, **_: object) -> int:
            Path(path).mkdir()
            (Path(path) / "model.safetensors").write_bytes(bytes(size))
            (Path(path) / "config.json").write_text("{}")
            return len(file)

    caplog.set_level("INFO")
    (tmp_path / "mine.gguf").write_bytes(bytes(100))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checkpoint_tools, "load_tools", lambda *_: Tools())
    local_checkpoint(str(tmp_path / "mine.gguf"))
    assert ("mine.gguf takes 3.6 times its size in bfloat16" in caplog.text) == quantized


def test_token_is_sent_and_named_if_absent(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with pytest.raises(CheckpointError, match="HF_TOKEN"):
        download("org/model")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (download("org/model") / "config.json").exists()


def test_earlier_download_serves_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = download("org/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert download("org/model") == folder
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        download("org/adapter")


def test_full_disk_is_found_beforehand(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(CheckpointError, match="does not fit on the disk.*HF_HOME"):
        download("org/model")
    assert not [one for one in hub.requests if "/cdn/" in one]


def test_caches_that_cannot_be_written_are_named(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, gguf = tmp_path / "model" / "config.json", tmp_path / "mine.gguf"
    gguf.touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(file / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    for name, variable in (("org/model", "HF_HOME"), (str(gguf), "XDG_CACHE_HOME")):
        with pytest.raises(CheckpointError, match=f"/config.json.* cannot .*: set {variable} to"):
            local_checkpoint(name)
