"""A random checkpoint of billions of weights in seconds: `python -m tests.bench.gpu.checkpoint PATH --size 3b25`.

As `vsched make-checkpoint`, but the weights are drawn on the device. They differ from those drawn on a CPU.
"""

from __future__ import annotations

import argparse
import time

import torch

from vsched_workers.checkpoint.random_init import make_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.checkpoint", description=__doc__
    )
    parser.add_argument("path", help="new folder")
    parser.add_argument("--size", default="3b25")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    began_s = time.monotonic()
    with torch.device(options.device):
        parameters = make_checkpoint(options.path, options.size)
    print(f"{parameters / 1e6:.0f} M parameters in {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()
