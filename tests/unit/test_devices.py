"""`device = "auto"`: the choice of devices, with a stand-in for the survey by torch."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.unit.media.fakes import model_info
from vsched import devices
from vsched.assembly import as_served
from vsched.cli.check_command import check_checkpoint, describe
from vsched.config import Config, LoadedConfig, load_config, plain_config
from vsched.config import devices as cheap
from vsched.config.devices import choose_placement
from vsched.engine import Engine
from vsched.errors import ConfigError
from vsched.types import ModelInfo
from vsched.worker.contract import CudaDevice, DeviceSurvey

GIB = 1 << 30
DEMO = Path(__file__).parents[2] / "workers" / "demo-model"
H200 = CudaDevice(
    name="NVIDIA H200", capability=(9, 0), total_bytes=140 * GIB, free_bytes=139 * GIB
)
T4 = CudaDevice(name="Tesla T4", capability=(7, 5), total_bytes=15 * GIB, free_bytes=14 * GIB)
FULL = msgspec.structs.replace(H200, name="NVIDIA H200 in use", free_bytes=GIB // 2)
OLD = CudaDevice(name="Tesla K80", capability=(3, 7), problem="its compute capability 3.7 is not")
TORCH = '''
"""A stand-in for torch."""
__version__ = "2.11.0"
FAILURE = {failure!r}

class version:
    cuda = {cuda!r}

class cuda:
    def init():
        print("noise of a library")
        if FAILURE:
            raise RuntimeError(FAILURE)

    def device_count():
        return 3

    def get_arch_list():
        return ["sm_75", "sm_80", "sm_90", "compute_120"]

    def get_device_properties(index):
        class Properties:
            name = ["new", "old", "busy"][index]
            major, minor = [(9, 0), (6, 1), (8, 6)][index]
        return Properties

    def mem_get_info(index):
        if index == 2:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy. See the log.")
        return 3, 4
'''


Pretend = Callable[..., list[str]]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Let this host have a device file of a GPU and given devices; return a list that gets each survey."""
    monkeypatch.delenv(cheap.VISIBLE_DEVICES, raising=False)

    def let(
        *found: CudaDevice,
        problem: str = "",
        failed: bool = False,
        info: ModelInfo | None = None,
        weights_bytes: int = 7 * GIB,
        visible: str | None = None,
    ) -> list[str]:
        surveys: list[str] = []
        if visible is not None:
            monkeypatch.setenv(cheap.VISIBLE_DEVICES, visible)

        def survey(plugin: str) -> DeviceSurvey:
            surveys.append(plugin)
            return DeviceSurvey(devices=found, problem=problem, failed=failed)

        monkeypatch.setattr(cheap, "DEVICE_FILES", ("/dev/null",))
        monkeypatch.setattr(devices, "_survey", survey)
        monkeypatch.setattr(devices, "weights_bytes", lambda _: weights_bytes)
        monkeypatch.setattr(devices, "_inspected", lambda _config, only_serves: info)
        return surveys

    return let


def load(*sets: str) -> LoadedConfig:
    return load_config(None, sets=sets, environ=os.environ)


def resolve(*sets: str) -> Config:
    return devices.resolve_loaded(load(*sets)).config


def test_cpu_host_surveys_nothing(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """No torch, no process: the device files decide."""
    surveys = pretend(H200)
    monkeypatch.setattr(cheap, "DEVICE_FILES", ("/nowhere/nvidiactl",))
    loaded = load()
    assert loaded.config.generate.device == loaded.config.encode.device == "cpu"
    assert devices.resolve_loaded(loaded) == loaded
    assert Engine(Config()).config == loaded.config
    assert loaded.devices is not None
    why = "cpu, because this host has no GPU: /nowhere/nvidiactl does not exist"
    assert loaded.devices.text == why
    assert surveys == []


@pytest.mark.parametrize(
    ("sets", "visible", "reason"),
    [
        ([], "", "CUDA_VISIBLE_DEVICES is ''"),
        ([], "-1", "CUDA_VISIBLE_DEVICES is '-1'"),
        (["model.deterministic=true"], None, "model.deterministic requires a CPU"),
        (["generate.kv_dtype=int8"], None, "generate.kv_dtype = int8 requires a CPU"),
        (["cluster.ray=auto"], None, "replicas are on other hosts"),
        (["generate.device=cpu", "encode.device=cpu"], None, "it is configured"),
    ],
)
def test_settings_that_need_a_cpu_survey_nothing(
    pretend: Pretend, sets: list[str], visible: str | None, reason: str
) -> None:
    surveys = pretend(H200, visible=visible)
    loaded = devices.resolve_loaded(load(*sets))
    assert {loaded.config.generate.device, loaded.config.encode.device} == {"cpu"}
    assert loaded.devices is not None
    assert reason in loaded.devices.text
    assert loaded.devices.missed == (" requires a CPU" in reason or "hosts" in reason)
    assert surveys == []


@pytest.mark.parametrize(
    ("found", "sets", "expected"),
    [
        ([H200], [], ("cuda:0", "cuda:0", "together")),
        ([H200], ["placement=separate"], ("cuda:0", "cuda:0", "separate")),
        ([H200, H200], [], ("cuda:0", "cuda:1", "separate")),
        ([H200, H200], ["placement=together"], ("cuda:0", "cuda:0", "together")),
        ([FULL, H200], [], ("cuda:1", "cuda:1", "together")),
        ([OLD, H200, H200], [], ("cuda:1", "cuda:2", "separate")),
        ([H200] * 4, ["generate.tensor_parallel=2"], ("cuda:0", "cuda:2", "separate")),
        ([H200] * 2, ["generate.tensor_parallel=2"], ("cuda:0", "cuda:0", "separate")),
        ([H200] * 2, ["generate.replicas=2", "encode.replicas=2"],
         ("cuda:0", "cuda:0", "together")),
        ([H200] * 2, ["encode.device=cuda:0"], ("cuda:1", "cuda:0", "separate")),
        ([H200] * 2, ["generate.device=cuda:1"], ("cuda:1", "cuda:0", "separate")),
        ([H200] * 2, ["generate.device=cpu"], ("cpu", "cuda:0", "separate")),
        ([H200] * 2, ["encode.replicas=0"], ("cuda:0", "cuda:0", "separate")),
        ([FULL, OLD], [], ("cpu", "cpu", "separate")),
    ],
)  # fmt: skip
def test_stages_share_one_device_and_have_their_own_if_there_are_several(
    pretend: Pretend, found: list[CudaDevice], sets: list[str], expected: tuple[str, str, str]
) -> None:
    pretend(*found)
    config = resolve(*sets)
    placement = choose_placement(config, weights_bytes=7 * GIB, cores=64).placement
    assert (config.generate.device, config.encode.device, placement) == expected


def test_model_without_images_needs_no_second_device(pretend: Pretend) -> None:
    text = model_info().text_alone
    pretend(H200, H200, info=text)
    config, _ = as_served(resolve(), text)
    assert (config.generate.device, config.encode.device) == ("cuda:0", "cuda:0")


@pytest.mark.parametrize(
    ("found", "problem", "why"),
    [
        ([], "The NVIDIA driver on your system is too old", "driver on your system is too old"),
        ([FULL], "", "in use has 512.0 MiB of 140.00 GiB free, and a rank needs 8.00 GiB: end"),
        ([OLD], "", "Tesla K80: its compute capability 3.7 is not"),
        ([msgspec.structs.replace(T4, total_bytes=4 * GIB, free_bytes=4 * GIB)], "",
         "has 4.00 GiB, and a rank needs 8.00 GiB: share the model among more devices"),
    ],
)  # fmt: skip
def test_unusable_gpu_is_a_warning_and_the_cpu_is_used(
    pretend: Pretend,
    caplog: pytest.LogCaptureFixture,
    found: list[CudaDevice],
    problem: str,
    why: str,
) -> None:
    pretend(*found, problem=problem)
    loaded = devices.resolve_loaded(load())
    assert loaded.config.generate.slots == 64
    devices.log_devices(loaded.devices)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("encode and generate on cpu, because no GPU can be used: ")
    assert why in record.message


@pytest.mark.parametrize(
    ("sets", "visible", "message"),
    [
        (
            ["generate.tensor_parallel=4"],
            None,
            "devices that can be used: value 1 x 4, limit 2 devices. Remedy: lower generate.tensor_parallel or",
        ),
        (["generate.replicas=3"], "0,1",
         "value 3 x 1, limit 2 devices with CUDA_VISIBLE_DEVICES=0,1"),
        (["generate.device=cuda:1", "generate.tensor_parallel=2"], None,
         "generate.device: 2 ranks need the devices up to cuda:2: value cuda:1, limit 2 devices."),
        (["encode.device=cuda:2"], None, "encode.device: 1 ranks need the devices up to cuda:2"),
        (["encode.replicas=3", "generate.replicas=1"], None, "encode.tensor_parallel: more ranks"),
    ],
)  # fmt: skip
def test_fewer_devices_than_ranks_are_an_error(
    pretend: Pretend, sets: list[str], visible: str | None, message: str
) -> None:
    pretend(H200, H200, visible=visible)
    with pytest.raises(ConfigError) as raised:
        resolve(*sets)
    assert message in str(raised.value)


def test_configured_device_is_not_replaced_by_a_cpu(pretend: Pretend) -> None:
    pretend(OLD)
    with pytest.raises(ConfigError, match="generate.device: cannot be used: value cuda:0, limit"):
        resolve("generate.device=cuda")
    pretend(problem="torch hung", failed=True)
    assert resolve("generate.device=cuda").generate.device == "cuda"
    assert resolve().generate.device == "cpu"
    surveys = pretend(OLD)
    assert resolve("generate.device=cuda", "encode.device=cuda", "model.dtype=bfloat16")
    assert surveys == [], "nothing depends on it"
    pretend(problem="torch 2.11.0+cpu is built without CUDA")
    with pytest.raises(ConfigError, match=r"limit torch 2.11.0\+cpu is built without CUDA"):
        resolve("generate.device=cuda")


def test_defaults_follow_the_device_and_settings_win(pretend: Pretend) -> None:
    pretend(H200)
    config = resolve()
    generate, arena = config.generate, config.arena
    assert (generate.slots, generate.max_batch_tokens, generate.chunk_tokens) == (256, 8192, 8192)
    assert (arena.pixel_bytes, arena.embedding_bytes) == (4 * GIB, GIB)
    loaded = devices.resolve_loaded(load())
    assert loaded.policies.item_tokens_max == 8192
    assert loaded.policies.encode_items_max == 8
    small = resolve("generate.max_batch_tokens=128", "arena.pixel_bytes=8192").generate
    assert (small.slots, small.max_batch_tokens, small.chunk_tokens) == (127, 128, 128)
    own = resolve("generate.slots=3000", "generate.chunk_tokens=99").generate
    assert (own.slots, own.chunk_tokens) == (3000, 99)
    with pytest.raises(ConfigError, match=r"generate\.slots: a step full of decodes"):
        resolve("generate.slots=3000", "generate.device=cpu", "encode.device=cpu")
    pretend(FULL)
    with pytest.raises(ConfigError, match=r"generate\.slots: a step full of decodes"):
        resolve("generate.slots=3000")


@pytest.mark.parametrize(
    ("device", "checkpoint", "configured", "expected"),
    [
        (H200, "float32", "auto", "bfloat16"),
        (H200, "bfloat16", "auto", "auto"),
        (H200, "float16", "auto", "auto"),
        (H200, "float32", "float32", "float32"),
        (T4, "float32", "auto", "float16"),
        (T4, "bfloat16", "auto", "float16"),
    ],
)
def test_data_type_follows_the_device(
    pretend: Pretend, device: CudaDevice, checkpoint: str, configured: str, expected: str
) -> None:
    info = msgspec.structs.replace(model_info(), dtype=checkpoint)
    pretend(device, info=info)
    assert resolve(f"model.dtype={configured}").model.dtype == expected


def test_engine_resolves_at_its_start(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(H200)
    engine = Engine(Config())
    assert engine.config.generate.device == "auto"

    def stop(config: Config, *_: object) -> None:
        raise ConfigError(f"{config.generate.device} {config.generate.slots}")

    monkeypatch.setattr("vsched.engine.inspect_checkpoint", stop)
    with pytest.raises(ConfigError, match="cuda:0 256"):
        asyncio.run(engine.start())


def test_resolved_configuration_resolves_to_itself(pretend: Pretend) -> None:
    """An API process and the engine get what the command line has resolved."""
    pretend(H200, H200, info=msgspec.structs.replace(model_info(), dtype="float32"))
    config = resolve()
    assert devices.resolve_devices(plain_config(config), os.environ)[0] == config


def test_check_names_the_devices_and_the_reason(pretend: Pretend) -> None:
    pretend(H200, FULL, weights_bytes=0)
    loaded = devices.resolve_loaded(load(f"model.path={DEMO}"))
    lines = list(describe(check_checkpoint(loaded)))
    (line,) = [one for one in lines if one.startswith("  devices")]
    assert "encode and generate on cuda:0 (NVIDIA H200, 139.00 GiB free); not used: " in line
    assert any("placement = together, because the stages share cuda:0" in one for one in lines)


@pytest.mark.parametrize(
    ("failure", "cuda", "problem"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040). Please update it.",
         "13.0",
         "The NVIDIA driver on your system is too old (found version 11040) (torch 2.11.0)"),
        ("", None, "torch 2.11.0 is built without CUDA; install"),
        ("", "13.0", ""),
    ],
)  # fmt: skip
def test_survey_reports_devices_and_reasons(
    tmp_path: Path, failure: str, cuda: str | None, problem: str
) -> None:
    """A child process, with a stand-in for torch."""
    (tmp_path / "torch.py").write_text(TORCH.format(failure=failure, cuda=cuda))
    command = [sys.executable, "-m", "vsched_workers.device_survey"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ran = subprocess.run(command, capture_output=True, check=True, env=environ)
    survey = msgspec.json.decode(ran.stdout.splitlines()[-1], type=DeviceSurvey)
    assert survey.problem.startswith(problem)
    if problem:
        assert survey.devices == ()
        return
    new, old, busy = survey.devices
    assert (new.name, new.capability, new.free_bytes, new.problem) == ("new", (9, 0), 3, "")
    assert old.problem.startswith("its compute capability 6.1 is not in torch 2.11.0, built for")
    assert busy.problem == "CUDA error: all CUDA-capable devices are busy"


def test_survey_reports_hangs_and_crashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vsched_workers import device_survey

    (tmp_path / "hung_driver.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(device_survey, "__name__", "hung_driver")
    hung = device_survey.survey_devices(timeout_s=0.2)
    assert hung.problem == "torch did not report its devices within 0.2 s"
    monkeypatch.setattr(device_survey, "__name__", "nowhere")
    assert "No module named nowhere" in device_survey.survey_devices(timeout_s=60).problem


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_80", "sm_90"], (8, 9), True),
        (["sm_80", "sm_90a"], (12, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),
        (["sm_100", "sm_120"], (12, 0), True),
        (["sm_75", "compute_120"], (7, 0), False),
    ],
)
def test_survey_knows_the_devices_that_a_build_supports(
    architectures: list[str], capability: tuple[int, int], expected: bool
) -> None:
    from vsched_workers.device_survey import is_built_for

    assert is_built_for(architectures, capability) is expected
