"""The order in which a rank loads models."""

from __future__ import annotations

import pytest

from tests.unit.rank.fake_plugin import LAYOUT, NAME, FakeGenerator, FakePlugin, model_info
from tests.unit.rank.worker_groups import LOAD
from tests.unit.worker.test_member import Link
from vsched.errors import CheckpointError
from vsched.transport.arena import Arena
from vsched.types import ModelInfo
from vsched.worker.contract import Progress, WorkerPlugin, WorkerSettings
from vsched.worker.member import Member, RankHost, RankLoading
from vsched.worker.spec import GenerateRole, RankSpec


class Recording(FakePlugin):
    """Records the models to load, and loads no deterministic one."""

    def __init__(self) -> None:
        self.requested: list[bool] = []

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> FakeGenerator:
        self.requested.append(settings.deterministic)
        if settings.deterministic:
            raise CheckpointError("that was the model")
        return super().load_generator(info, settings, progress)


def test_a_draft_model_is_loaded_first_so_that_the_process_is_as_the_model_wants_it() -> None:
    """A deterministic model sets torch to one thread, and a draft model, which need not be, to all."""
    plugin = Recording()
    role = GenerateRole(
        address="",
        plugin=NAME,
        settings=WorkerSettings(deterministic=True),
        limits=LOAD,
        draft=model_info(),
    )
    spec = RankSpec(
        rank=0, secret="", layout=LAYOUT, info=model_info(), timeout_s=60, generate=role
    )

    def found(_name: str) -> WorkerPlugin:
        return plugin

    arena, host = Arena.create(LAYOUT), RankHost(load_worker=found)
    try:
        with pytest.raises(CheckpointError, match="that was the model"):
            RankLoading(spec, arena, [Member(spec, Link(), host)], host).begin()
    finally:
        arena.close()
    assert plugin.requested == [False, True]
