"""Communication between the ranks of a group on a CPU: gloo over the loopback interface."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed

_DISTRIBUTED: Any = torch.distributed


class GlooCollectives:
    """See `Collectives`."""

    exchanges = True
    wakes_peers = True
    runs_behind = False

    def connect(self, store: Any, rank: int, size: int, *, timeout_s: float) -> Any:
        gloo = _DISTRIBUTED.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001  # torch offers these under such names only
        options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        return gloo(store, rank, size, options)
