"""Print the digest of every command of a random run; started in processes of their own by a test."""

from __future__ import annotations

import random
import sys
from hashlib import blake2b

import msgspec

from tests.unit.kernel.policy_pool import random_policies
from vsched.kernel.commands import Command
from vsched.testing import ModelCluster, run_random

DIGEST = blake2b(digest_size=16)
COUNTED: dict[str, int] = {}


class RecordingCluster(ModelCluster):
    """Adds every command to the digest, as it would be encoded for the wire."""

    def carry_out(self, command: Command) -> None:
        name = type(command).__name__
        COUNTED[name] = COUNTED.get(name, 0) + 1
        DIGEST.update(name.encode())
        DIGEST.update(msgspec.msgpack.encode(command))
        super().carry_out(command)


def main(seeds: int) -> None:
    for seed in range(seeds):
        run_random(random.Random(seed), make=RecordingCluster)
        rng = random.Random(seed)
        run_random(rng, random_policies(rng), make=RecordingCluster)
    print(DIGEST.hexdigest(), sorted(COUNTED.items()), hash("a string"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
