"""Run `vsched replay` in a process of its own."""

from __future__ import annotations

import sys

from vsched.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "replay")
    main()
