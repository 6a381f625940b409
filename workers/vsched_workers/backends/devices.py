"""Whether this machine, and this build of torch, have the device that is configured."""

from __future__ import annotations

import torch

from vsched.errors import ConfigError, limit_message


def check_device(device: str, *, key: str) -> None:
    """Refuse a device that a rank could not use; `key` is the path of the configuration key that names it.

    Raises:
        ConfigError: With value, limit and remedy.
    """
    kind, _, number = device.partition(":")
    if device == "cpu":
        return
    what, limit, remedy = f"{key}: not a device", "cpu, cuda or cuda:N", f"set {key} to cpu"
    if kind == "cuda":
        count = torch.cuda.device_count()
        if torch.version.cuda is None and torch.version.hip is None:
            what = f"{key}: this build of torch ({torch.__version__}) cannot use a GPU"
            limit = "cpu"
            remedy = f"set {key} to cpu, or install a build of torch with CUDA"
        elif count == 0:
            what, limit = f"{key}: torch finds no GPU", "cpu"
            remedy = f"set {key} to cpu, or see whether `nvidia-smi` lists a GPU, and CUDA_VISIBLE_DEVICES allows it"
        elif int(number or 0) >= count:
            what, limit = f"{key}: no such GPU; every rank takes one", f"cuda:{count - 1}"
            remedy = f"lower {key}, replicas or tensor_parallel"
        else:
            return
    raise ConfigError(limit_message(what, value=device, limit=limit, remedy=remedy))
