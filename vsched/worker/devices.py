"""CUDA devices of a host, as reported by a worker plug-in."""

from __future__ import annotations

import msgspec


class CudaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A CUDA device.

    Attributes:
        capability: Compute capability, major and minor.
        free_bytes: Memory that no process uses.
        problem: Reason why it cannot be used; empty if it can.
    """

    name: str
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    free_bytes: int = 0
    problem: str = ""

    @property
    def has_bfloat16(self) -> bool:
        """True if the device computes in bfloat16."""
        return self.capability >= (8, 0)


class DeviceSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """The CUDA devices that processes of this host can use, in the order of `cuda:N`.

    Attributes:
        problem: Reason why there are none; empty if there are some.
        failed: True if the survey itself failed, so that there may be devices in spite of it.
    """

    devices: tuple[CudaDevice, ...] = ()
    problem: str = ""
    failed: bool = False
