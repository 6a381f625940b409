"""Print the digest of every command of a random run; started in processes of their own by a test."""

from __future__ import annotations

import sys
from hashlib import blake2b

import msgspec

from tests.unit.kernel import test_scheduler_random as random_runs
from tests.unit.kernel.model_ranks import Cluster
from vsched.kernel.commands import Command
from vsched.kernel.events import Event

DIGEST = blake2b(digest_size=16)
COUNTED: dict[str, int] = {}


class RecordingCluster(Cluster):
    """Adds every command to the digest, byte for byte as it would travel."""

    def send(self, event: Event) -> list[Command]:
        commands = super().send(event)
        for command in commands:
            name = type(command).__name__
            COUNTED[name] = COUNTED.get(name, 0) + 1
            DIGEST.update(name.encode())
            DIGEST.update(msgspec.msgpack.encode(command))
        return commands


def main(seeds: int) -> None:
    random_runs.__dict__["Cluster"] = RecordingCluster
    for seed in range(seeds):
        random_runs.run_random(seed)
    print(DIGEST.hexdigest(), sorted(COUNTED.items()), hash("a string"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
