"""Communication between the ranks of a group on GPUs: NCCL. Not yet run on several GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed

_DISTRIBUTED: Any = torch.distributed


class NcclCollectives:
    """See `Collectives`. A closed connection does not wake peers: each rank has to abort its own group."""

    exchanges = False
    wakes_peers = False
    runs_behind = True

    def connect(self, store: Any, rank: int, size: int, *, timeout_s: float) -> Any:
        nccl = _DISTRIBUTED.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        return nccl(store, rank, size, options)
