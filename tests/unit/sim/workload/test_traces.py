"""Traces: each format is recognized by its first line, and an error names the line of a wrong row."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.unit.sim.shapes import arrival
from vsched.errors import ConfigError
from vsched.sim.workload.requests import Arrival, Image, Reply, Text, workload_of
from vsched.sim.workload.traces import TraceError, load_trace, save_trace

SERVEGEN = "arrival_s,text_tokens,image_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
IMAGES = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        (
            SERVEGEN + "0.5,179,1200|30,2\n1.25,20,,7\n",
            [(0, 1409, [1200, 30], 2), (0.75, 20, [], 7)],
        ),
        (
            AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04,3,8\n",
            [(0, 4808, [], 10), (0.02004, 3, [], 8)],
        ),
        (
            AZURE + "2024-05-10 00:00:00.009930+00:00,10,1\n2024-05-10 00:00:01.009930+00:00,9,2\n",
            [(0, 10, [], 1), (1, 9, [], 2)],
        ),
        # The context includes the images.
        (
            IMAGES + "2024-10-15 00:00:00,2,2000,5\n2024-10-15 00:00:01,3,40,5\n",
            [(0, 2000, [765, 765], 5), (1, 40, [13, 13, 13], 5)],
        ),
        # A failure is left out.
        (
            BURST + "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n60,GPT-4,9,2,11,API log\n",
            [(0, 472, [], 18), (55, 9, [], 2)],
        ),
    ],
    ids=["ServeGen", "Azure 2023", "Azure 2024", "Azure with images", "BurstGPT"],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_table_is_read_as_arrivals(
    tmp_path: Path, text: str, arrivals: list[tuple[float, int, list[int], int]], packed: bool
) -> None:
    path = tmp_path / ("trace.csv.gz" if packed else "trace.csv")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    workload = load_trace(path)
    found = [
        (
            one.at_ns / 1e9,
            one.prompt_tokens,
            [each.tokens for each in one.images],
            one.output_tokens,
        )
        for one in workload
    ]
    assert found == [(pytest.approx(at_s, abs=1e-6), *rest) for at_s, *rest in arrivals]
    assert workload.requests == 2
    left_out = ("1 rows without output tokens were left out",) if text.startswith(BURST) else ()
    assert workload.notes == left_out


def test_trace_images_and_texts_occur_once(tmp_path: Path) -> None:
    path = write(tmp_path, SERVEGEN + "0,10,5|5,1\n0,10,5,1\n")
    first, second = load_trace(path)
    keys = [image.key for image in [*first.images, *second.images]]
    assert len(set(keys)) == 3
    assert first.prompt[-1] != second.prompt[-1]


def test_mooncake_trace_shares_prefixes(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 27000, "input_length": 520, "output_length": 5, "hash_ids": [7, 3]}\n',
        "trace.jsonl",
    )
    first, second = load_trace(path)
    assert first.prompt == (Text(7, 512), Text(8, 512), Text(9, 76))
    assert second.prompt[0] == first.prompt[0]
    assert second.at_ns == 27_000_000_000


def test_bailian_trace_has_conversations_and_short_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 38, "output_length": 9, '
        '"type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091]}\n'
        '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 66.1, "input_length": 52, "output_length": 4, '
        '"type": "text", "turn": 2, "hash_ids": [1089, 1090, 2001]}\n',
        "trace.jsonl",
    )
    first, second = load_trace(path)
    assert first.prompt == (Text(1089, 16), Text(1090, 16), Text(1091, 6))
    assert second.prompt[:3] == (Text(1089, 16), Text(1090, 16), Text(2001, 16))
    assert second.prompt_tokens == 52
    assert second.at_ns == 5_000_000_000
    assert first.conversation == second.conversation != ""


def test_own_trace_reads_as_it_was_written(tmp_path: Path) -> None:
    arrivals = [
        arrival(0, 0, Text(1, 5), Image("a", 7), conversation="c", tenant="t", priority=2),
        arrival(1, 5, Text(1, 5), adapter="sql"),
        arrival(2, 5, Text(1, 5), Image("a", 7), Reply(4), conversation="c", think_ns=9),
    ]
    path = tmp_path / "own.jsonl"
    save_trace(workload_of("own", arrivals), str(path))
    assert list(load_trace(path)) == arrivals


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (SERVEGEN + "0,1,1,1\n1,1,5|x,1\n", 3, "image_tokens is '5|x', not counts"),
        (SERVEGEN + "0,1,1,1\n\n1,many,1,1\n", 4, "text_tokens is 'many', not a number"),
        (SERVEGEN + "0,1,1,1.5\n", 2, "output_tokens is 1.5, not a count"),
        (SERVEGEN + "0,1,1\n", 2, "output_tokens is '', not a number"),
        (SERVEGEN + "0,1,1,inf\n", 2, "output_tokens is inf, not a count"),
        (
            '{"timestamp": 0, "input_length": 9, "output_length": -1, "hash_ids": [1]}',
            1,
            "output_length",
        ),
        (SERVEGEN + "nan,1,1,1\n", 2, "arrival_s is nan, not a time"),
        (SERVEGEN + "2,1,1,1\n1.5,1,1,1\n", 3, "0.5 s before the row above; sort"),
        (AZURE + "yesterday,1,1\n", 2, "TIMESTAMP is 'yesterday', not a date and time"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}', 1, "make 5"),
        ('{"at_ns": 0, "request_id": "a", "prompt": [], "output_tokens": 0}', 1, "output_tokens"),
        ('{"at_ns": 0}\n', 1, "request_id"),
        ("one,two\n1,2\n", 1, "this header is of no known format: 'one,two'. Known: arrival_s"),
    ],
)
def test_trace_errors_name_line_and_cause(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as error:
        load_trace(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert what in str(error.value)


@pytest.mark.parametrize("kept", [0.2, 0.9])
def test_trace_that_was_not_downloaded_to_its_end(tmp_path: Path, kept: float) -> None:
    packed = gzip.compress(b"".join(b"%d,%d,,1\n" % (one, one * one) for one in range(2000)))
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(SERVEGEN.encode()) + packed[: int(len(packed) * kept)])
    with pytest.raises(TraceError, match=r"trace\.csv\.gz:\d+: .* ended before"):
        load_trace(path)


def test_trace_without_requests_or_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no requests"):
        load_trace(write(tmp_path, SERVEGEN))
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "none.csv")


def test_workload_first_and_faster(tmp_path: Path) -> None:
    path = write(tmp_path, SERVEGEN + "".join(f"{second},5,,1\n" for second in range(10)))
    workload = load_trace(path).first(3).faster(4)
    assert workload.requests == 3
    assert [one.at_ns for one in workload] == [0, 250_000_000, 500_000_000]
    assert len(list(workload)) == 3, "it can be gone through again"
    for factor in (0.0, math.nan):
        with pytest.raises(ConfigError, match="--speed: no speed-up: value "):
            workload.faster(factor)


def test_workload_of_conversations_is_faster_with_its_pauses() -> None:
    one = workload_of("talk", [arrival(0, 8, Text(1, 5), conversation="c", think_ns=4000)])
    assert [(each.at_ns, each.think_ns) for each in one.faster(4)] == [(2_000_000, 1000)]


def test_workload_of_has_values_of_the_declared_types(tmp_path: Path) -> None:
    """Workloads are drawn with numpy, whose numbers cannot be encoded in traces and digests."""
    odd = Arrival(
        at_ns=np.int64(7),  # type: ignore[arg-type]
        request_id=np.str_("r"),
        prompt=[Text(np.int64(1), np.int64(2)), Image(np.str_("cat"), 3)],  # type: ignore[arg-type]
        output_tokens=np.int32(4),  # type: ignore[arg-type]
    )
    save_trace(workload_of("own", [odd]), tmp_path / "own.jsonl")
    (kept,) = workload_of("own", [odd])
    assert list(load_trace(tmp_path / "own.jsonl")) == [msgspec.structs.replace(kept, at_ns=0)]
    assert kept == msgspec.structs.replace(
        arrival(0, 0, Text(1, 2), Image("cat", 3)), at_ns=7, request_id="r"
    )


def test_workload_of_refuses_values_of_a_wrong_type() -> None:
    with pytest.raises(ConfigError, match=r"^arrivals\[0\].at_ns is not valid: value 1.5, limit"):
        workload_of("own", [msgspec.structs.replace(arrival(0, 0), at_ns=1.5)])
