"""The grammar server: `python -m vsched.worker.grammar_server`, which forks one process for each grammar to check.

The grammar library of a plug-in is native code, and a schema can make it crash, loop, or exhaust memory. Ranks compile
a grammar only after a process of this server has compiled it with less stack and less memory than a rank has.
"""

from __future__ import annotations

import resource
import socket
import sys
import traceback

import msgspec
from setproctitle import setproctitle

from vsched.errors import RequestRefused
from vsched.isolated.server import Channel, limit_resources, read_frame, read_setup, serve
from vsched.types import ModelInfo
from vsched.worker.contract import GRAMMAR_NOT_SUPPORTED, INVALID_GRAMMAR, Grammars
from vsched.worker.registry import load_worker

NAME = "vsched: grammars"
CPU_S_MAX = 1.0
"""CPU time of one check. The plug-in has a lower limit of its own; this one stops endless loops."""
WALL_S_MAX = 15.0
"""Time of one check: out of memory, the library may wait for a lock for ever, without CPU time.

Fifteen times the CPU time: on a busy machine a check may get less than a fifth of a core.
"""
MEMORY_BYTES_MAX = 64 << 20
"""Memory of one check: five times the usage of the largest 64 KiB schemas."""
_STACK_BYTES_MAX = 8 << 20


class GrammarSetup(msgspec.Struct, frozen=True):
    """The setup of the server: the plug-in's name, and the model whose tokens the grammars use."""

    plugin: str
    info: ModelInfo


class GrammarOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check: an empty message if the grammar can be used."""

    message: str = ""
    code: str = ""


def _check(grammars: Grammars | None, grammar: str) -> GrammarOutcome:
    """Compile a grammar; this may crash the process."""
    if grammars is None:
        return GrammarOutcome(
            message="structured output is not supported for this model: it needs a byte-level tokenizer and an end "
            "token. Remedy: describe the format in the prompt.",
            code=GRAMMAR_NOT_SUPPORTED,
        )
    # A grammar that compiles with half of a rank's stack does not overflow the stack of a rank.
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK_BYTES_MAX if soft == resource.RLIM_INFINITY else min(soft, _STACK_BYTES_MAX)
    limit_resources(
        cpu_s=CPU_S_MAX,
        wall_s=WALL_S_MAX,
        memory_bytes=MEMORY_BYTES_MAX,
        stack_bytes=stack // 2,
    )
    message = code = ""
    try:
        grammars.check(grammar)
    except RequestRefused as error:
        message, code = error.message, error.code
    except BaseException:  # noqa: BLE001 - a Rust panic is not an Exception
        traceback.print_exc()
        message, code = (
            "the schema or grammar cannot be used. Remedy: simplify it.",
            INVALID_GRAMMAR,
        )
    message = message.encode(errors="backslashreplace").decode()  # it may quote half a character
    return GrammarOutcome(message=message, code=code)


def main() -> int:
    """Serve; the arguments are two file descriptors: the socket for orders, and the setup file."""
    orders, setup_file = map(int, sys.argv[1:])
    setproctitle(NAME)
    setup = msgspec.json.decode(read_setup(setup_file), type=GrammarSetup)
    grammars = load_worker(setup.plugin).load_grammars(setup.info)

    def answer(channel: Channel) -> bytes:
        return msgspec.json.encode(_check(grammars, read_frame(channel).decode()))

    serve(socket.socket(fileno=orders), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
