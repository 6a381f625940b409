"""One encode group: the batch that is out there."""

from __future__ import annotations

from vsched.kernel.decisions import EncodeDecision, EncodeTask
from vsched.kernel.encode.embedding_cache import EmbeddingEntry
from vsched.kernel.groups import Group


class EncodeGroup(Group):
    """One encode group: at most one batch is out there at a time.

    Attributes:
        orphaned: Pages of the batch that was out when the group was lost. Its ranks may still be there, and write to
            them: nobody else gets these pages until the group is back or given up, for then they are gone.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.flying: list[EmbeddingEntry] = []
        self.orphaned: list[int] = []
        self.step = 0

    @property
    def idle(self) -> bool:
        """Whether no batch is out."""
        return not self.flying

    def send(self, batch: list[EmbeddingEntry], *, stretch_ns: int) -> EncodeDecision:
        """Note a batch as out, and return the decision that sends it there."""
        self.flying = batch
        self.step += 1
        return EncodeDecision(self.step, [_task(entry) for entry in batch], stretch_ns=stretch_ns)

    def land(self, step: int) -> list[EmbeddingEntry]:
        """Take the batch that was out."""
        assert step == self.step, f"encode step {step} came back, {self.step} is out"
        assert self.flying, f"encode step {step} came back, nothing is out"
        batch, self.flying = self.flying, []
        return batch

    def lose(self) -> list[EmbeddingEntry]:
        """The group is gone: take the batch that was out, without its pages."""
        batch, self.flying = self.flying, []
        for entry in batch:
            self.orphaned += entry.pages
            entry.pages = []
        return batch

    def statistics(self) -> dict[str, str | int]:
        """Return its state, what it works on, and how often it did."""
        return {
            "state": self.status.value,
            "running_items": len(self.flying),
            "steps": self.step,
        }


def _task(entry: EmbeddingEntry) -> EncodeTask:
    item = entry.item
    assert item.pixels is not None, "an item without pixels reached the encode stage"
    pages = list(entry.pages)
    return EncodeTask(item.key, item.grid, item.tokens, item.pixels, pages, item.encoded)
