"""Check that quantizing ranks' shares of weights is equivalent to quantizing whole weights."""

from __future__ import annotations

from collections.abc import Mapping

from vsched.errors import ConfigError
from vsched.worker.contract import WorkerSettings
from vsched_workers.parallel.slicing import Cut
from vsched_workers.quantized.schemes import GROUPS


def check_groups(cuts: Mapping[str, Cut], settings: WorkerSettings, *, stage: str) -> None:
    """Check that no rank's share of inputs begins or ends within a group, whose scale would differ.

    Raises:
        ConfigError: When one does, with the remedy.
    """
    if not settings.quantizes:
        return
    group = settings.weights_group or GROUPS[settings.weights]
    borders = {
        place
        for cut in cuts.values()
        if cut.dimension == 1
        for span in cut.spans
        for place in span
        if place != cut.whole
    }
    cut_through = sorted(place for place in borders if place % group)
    if cut_through:
        fitting = [each for each in (64, 48, 32, 16) if not any(place % each for place in borders)]
        smaller = f"set {stage}.weights_group to {fitting[0]}, or " if fitting else "set "
        raise ConfigError(
            f"{stage}.weights_group: a rank's inputs begin or end at {cut_through[0]}, within a group of {group}, and "
            f"results would differ from those of one rank. Remedy: {smaller}{stage}.tensor_parallel to 1."
        )
