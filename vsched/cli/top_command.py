"""`vsched top`: the live state of a running server in the terminal."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from vsched.cli import app
from vsched.errors import ConfigError, VschedError
from vsched.terminal.options import new_table

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from vsched.aio.live import LiveState

ANSWER_S = 10.0
"""Maximum time between two states."""
EVERY_S = 1.0
"""Time between two states of a server that does not stream them, or that was lost."""
ROWS_RESERVED = 14
"""Lines of the terminal for everything but requests."""


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="URL of the server.")] = "http://127.0.0.1:8000",
    key_variable: Annotated[
        str, typer.Option(help="Environment variable with the key of operators.")
    ] = "VSCHED_ADMIN_KEY",
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one state and exit.")] = False,
) -> None:
    """Show the running and waiting requests of a server, with reasons, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    key = os.environ.get(key_variable, "")
    if once:
        try:
            first = next(read_states(url, key), None)
        except ConnectionError as error:
            raise VschedError(f"{error}. Remedy: start the server, or name its URL") from error
        if first is None:
            raise VschedError(f"{url} sent no state; it may be stopping. Remedy: try again")
        console.print(frame(first, None, _rows(console)))
        return
    if not console.is_terminal:
        raise ConfigError(
            "vsched top: standard output is no terminal. Remedy: --once prints one state"
        )
    before: LiveState | None = None
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True) as live:
        while True:
            try:
                for state in read_states(url, key):
                    live.update(frame(state, before, _rows(console)), refresh=True)
                    before = state
            except ConnectionError as error:
                live.update(f"{error}; trying again", refresh=True)
            time.sleep(EVERY_S)


def _rows(console: Console) -> int:
    return max(console.size.height - ROWS_RESERVED, 5)


def read_states(url: str, key: str) -> Iterator[LiveState]:
    """Yield the states of a server: its stream, or the one state that a server without streams has.

    Blocks: up to `ANSWER_S` for each.

    Raises:
        ConnectionError: If the server cannot be reached.
        ConfigError: If the URL is not valid.
        VschedError: If the server refuses.
    """
    import msgspec

    from vsched.aio.live import LiveState

    decode = msgspec.json.Decoder(LiveState).decode
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # an impossible port, or half an IPv6 address
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"vsched top: not a URL: value {url!r}, limit http://HOST:PORT. Remedy: name a server"
        )
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=ANSWER_S)
    headers = {"accept": "text/event-stream"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/admin/live", headers=headers)
        reply = connection.getresponse()
        if reply.status != HTTPStatus.OK:
            raise VschedError(_refusal(reply))
        if reply.headers.get_content_type() != "text/event-stream":
            yield decode(reply.read())
            return
        for line in reply:
            if line.startswith(b"data: {"):
                yield decode(line.removeprefix(b"data: "))
    except msgspec.MsgspecError as error:
        raise VschedError(
            f"{url} is no server of this version of vsched: {error}. Remedy: name its URL"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"no connection to {url}: {error}") from error
    finally:
        connection.close()


def _refusal(reply: http.client.HTTPResponse) -> str:
    text = reply.read().decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return f"the server refuses: status {reply.status}: {text[:500]}"


def frame(state: LiveState, before: LiveState | None, rows: int) -> Group:
    """Draw a state, with at most this number of requests; rates are those since the state before."""
    from rich.console import Group
    from rich.text import Text

    generate = state.counters.get("generate", {})
    head = (
        f"{state.model}: {state.state}, up {state.uptime_s:.0f} s   "
        f"running {state.counters.get('running', 0)} of {generate.get('slots_total', 0)}   "
        f"waiting {state.counters.get('waiting', 0)}   preemptions {generate.get('preemptions', 0)}"
    )
    if before is not None and state.now_ns > before.now_ns:
        seconds = (state.now_ns - before.now_ns) / 1e9
        past = before.counters.get("generate", {})
        output, prompt = (
            (generate.get(name, 0) - past.get(name, 0)) / seconds
            for name in ("tokens_decoded", "tokens_prefilled")
        )
        head += f"   output {output:.0f} tokens/s   prompt {prompt:.0f} tokens/s"
    parts: list[Text | Table] = [Text(head, style="bold"), _groups(state)]
    faulty = [one for one in state.policies if one.faults or one.replaced]
    parts += [
        Text(f"{one.table}: {one.use}: {one.faults} faults {one.replaced}", style="red")
        for one in faulty
    ]
    parts.append(_requests(state, rows))
    return Group(*parts)


def _groups(state: LiveState) -> Table:
    columns = ("group", "state", "running", "waiting", "KV blocks held", "cached", "restarts")
    table = new_table("", *columns, texts=("group", "state"), box=None, pad_edge=False)
    for row in state.groups:
        kv = state.kv.get(row["name"])
        held, cached = (f"{kv.totals[0]}/{kv.count}", str(kv.totals[1])) if kv else ("", "")
        numbers = (row["running"], row["waiting"], held, cached, row["restarts"])
        table.add_row(row["name"], row["state"], *map(str, numbers))
    return table


def _requests(state: LiveState, rows: int) -> Table:
    """Draw the requests, waiting ones first."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("request", "tenant", "for", "prompt", "output", "phase and reason"):
        table.add_column(name, overflow="ellipsis", no_wrap=name != "phase and reason")
    ordered = sorted(state.requests, key=lambda row: row.slot >= 0)
    for row in ordered[:rows]:
        since = f"{(state.now_ns - row.since_ns) / 1e9:.1f} s" if row.since_ns else ""
        prompt, output = f"{row.computed}/{row.prompt_tokens}", f"{row.outputs}/{row.max_tokens}"
        texts = (row.request_id, row.tenant, since, prompt, output, row.why)
        style = "" if row.slot >= 0 else "yellow"
        table.add_row(*(Text(text) for text in texts), style=style)
    left = state.requests_total - min(len(ordered), rows)
    if left:
        table.caption = f"and {left} more"
    return table
