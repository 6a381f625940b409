"""Checkpoints named by a hub id or a GGUF file, with a server of the hub's API on loopback."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub import close_session

from tests.unit.hub_server import HubServer, hub_server
from vsched import checkpoints
from vsched.checkpoints import download, is_hub_id, local_checkpoint, with_local_checkpoints
from vsched.config import Config, load_config
from vsched.errors import CheckpointError

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
    folders = {"org/model": "model", "org/pickles": "pickles", "org/adapter": "adapter"}
    with hub_server({name: tmp_path / folder for name, folder in folders.items()}) as server:
        cache = tmp_path / "cache"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        close_session()
        yield server
        close_session()


def test_hub_id_is_a_name_with_one_slash_and_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen/Qwen2.5-VL-3B-Instruct", "org/model@v1.0", "org/model:Q4_K_M"):
        assert is_hub_id(name)
    for name in ("", "model", "./org/model", "/org/model", "a/b/c", "../model"):
        assert not is_hub_id(name)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert not is_hub_id("org/model"), "a folder of this name is meant"


def test_download_takes_the_files_that_a_server_reads_and_once(hub: HubServer) -> None:
    folder = download("org/model")
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.requests.clear()
    assert download("org/model") == folder
    assert not [one for one in hub.requests if "/cdn/" in one]


def test_download_resumes_a_file_that_was_cut(hub: HubServer) -> None:
    hub.cuts = 1
    folder = download("org/model")
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_download_follows_a_renamed_repository(hub: HubServer) -> None:
    assert (download("org/old-name") / "config.json").exists()


def test_configuration_gets_folders_and_clients_the_hub_id(hub: HubServer) -> None:
    config = load_config(
        None,
        sets=[
            "model.path=org/model@main",
            'adapters.load={sql = "org/adapter"}',
            "adapters.count_max=1",
        ],
        environ={},
    ).config
    local = with_local_checkpoints(config)
    assert Path(local.model.path, "config.json").exists()
    assert local.model.served_name == "org/model"
    adapter = Path(local.adapters.load["sql"])
    assert sorted(file.name for file in adapter.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert with_local_checkpoints(Config()) == Config()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("org/nothing", "neither a folder nor a repository at 127.0.0.1"),
        ("org/model@v2", "no such revision"),
        ("org/pickles", "no weights as safetensors, only"),
        ("org/model:Q4_K_M", "no weights as safetensors"),
    ],
)
def test_missing_repository_revision_or_weights_is_one_sentence(
    hub: HubServer, name: str, text: str
) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        download(name)
    assert "Remedy:" in str(error.value)
    assert "\n" not in str(error.value)


def test_part_is_the_named_gguf_file_after_another_was_downloaded(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("Q4_K_M", "Q8_0"):
        (hub.repositories["org/model"] / f"model-{part}.gguf").write_bytes(part.encode())
    monkeypatch.setattr(checkpoints, "_converted", lambda file, _: file.name)
    for part in ("Q4_K_M", "Q8_0"):
        assert local_checkpoint(f"org/model:{part}") == f"model-{part}.gguf"
    assert (Path(local_checkpoint("org/model")) / "model.safetensors").exists()


def test_part_of_several_gguf_files_is_an_error_before_they_are_downloaded(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a name is preferred."""
    for part in ("Q4_K", "Q4_K_M", "Q4_K_S"):
        (hub.repositories["org/model"] / f"model-{part}.gguf").write_bytes(part.encode())
    monkeypatch.setattr(checkpoints, "_converted", lambda file, _: file.name)
    assert local_checkpoint("org/model:Q4_K") == "model-Q4_K.gguf"
    with pytest.raises(CheckpointError, match=r"3 files have 'Q4' .*model-Q4_K_M.gguf.*Remedy"):
        local_checkpoint("org/model:Q4")
    folder = download("org/model:Q4_K")
    assert [file.name for file in folder.glob("*.gguf")] == ["model-Q4_K.gguf"]


def test_token_is_sent_and_its_lack_is_one_sentence(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "secret"
    with pytest.raises(CheckpointError, match="HF_TOKEN"):
        download("org/model")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (download("org/model") / "config.json").exists()


def test_gated_repository_is_one_sentence(hub: HubServer) -> None:
    hub.gated.add("org/model")
    with pytest.raises(CheckpointError, match="accepted its terms"):
        download("org/model")


def test_earlier_download_serves_without_a_connection(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = download("org/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert download("org/model") == folder
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        download("org/adapter")


def test_full_disk_is_found_before_the_download(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(CheckpointError, match="does not fit on the disk.*HF_HOME"):
        download("org/model")
    assert not [one for one in hub.requests if "/cdn/" in one]
