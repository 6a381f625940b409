"""`python -m vsched` is the `vsched` command."""

from vsched.cli.main import main

main()
