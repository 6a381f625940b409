"""The CUDA devices that torch can use: `python -m vsched_workers.device_survey` prints them as one line of JSON.

It runs in a process of its own, which ends afterwards: CUDA cannot be used after a fork, and its context takes memory
of the device.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import msgspec

from vsched.worker.contract import CudaDevice, DeviceSurvey


def survey_devices(*, timeout_s: float) -> DeviceSurvey:
    """Run the survey in a child process; an error or a timeout becomes the problem of the survey."""
    command = [sys.executable, "-m", __name__]
    try:
        ran = subprocess.run(  # noqa: S603 - no outside input
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        problem = f"torch did not report its devices within {timeout_s:g} s"
        return DeviceSurvey(problem=problem, failed=True)
    lines = ran.stdout.splitlines()
    try:
        return msgspec.json.decode(lines[-1], type=DeviceSurvey)
    except (IndexError, msgspec.DecodeError):
        last = (ran.stderr.decode(errors="replace").split("\n") or [""])[-2:][0].strip()
        return DeviceSurvey(
            problem=f"torch could not report its devices (exit code {ran.returncode}): {last}",
            failed=True,
        )


def is_built_for(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """True if a build with these architectures, such as `sm_90` and `compute_120`, runs on this capability."""
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = "".join(filter(str.isdigit, number))
        if not digits:
            continue
        built = divmod(int(digits), 10)
        # Binaries run on later minor versions, and intermediate code is compiled for all later ones.
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def survey() -> DeviceSurvey:
    """Return the devices of this process, by torch."""
    try:
        import torch
    except ImportError as error:
        return DeviceSurvey(problem=f"torch is not installed ({error})")
    version = str(torch.__version__)
    if torch.version.cuda is None:
        return DeviceSurvey(
            problem=f"torch {version} is built without CUDA; install the build of PyPI: pip install torch"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
            count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        return DeviceSurvey(problem=f"{_first_sentence(error)} (torch {version})")
    if not count:
        return DeviceSurvey(problem=f"torch {version} sees no CUDA device")
    return DeviceSurvey(devices=tuple(_device(torch, index, version) for index in range(count)))


def _device(torch: Any, index: int, version: str) -> CudaDevice:
    """Return a device; an error becomes its problem."""
    name = f"cuda:{index}"
    try:
        properties = torch.cuda.get_device_properties(index)
        name = f"{properties.name}"
        capability = (properties.major, properties.minor)
        architectures = torch.cuda.get_arch_list()
        if architectures and not is_built_for(architectures, capability):
            problem = (
                f"its compute capability {capability[0]}.{capability[1]} is not in torch {version}, "
                f"built for {', '.join(architectures)}"
            )
            return CudaDevice(name=name, capability=capability, problem=problem)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return CudaDevice(name=name, problem=_first_sentence(error))
    return CudaDevice(
        name=name, capability=capability, total_bytes=total_bytes, free_bytes=free_bytes
    )


def _first_sentence(error: Exception) -> str:
    """The first sentence of a message, which may end with advice and addresses."""
    text = " ".join(str(error).split())
    return text.partition(". ")[0].rstrip(".")


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(survey()) + b"\n")
