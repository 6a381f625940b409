"""The benchmark of adapters, at its smallest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.adapters import HEAD, Round, adapters, line
from tests.bench.options import make_parser
from tests.parity.architectures import make_checkpoint


def test_table_has_the_median_and_the_range_of_paired_rounds() -> None:
    rounds = [(Round(1.0, 10.0), Round(2.0, 5.0)), (Round(2.0, 10.0), Round(2.0, 9.0))]
    text = line("vsched", 4, 8, rounds)
    assert text == "| vsched | 4 | 8 | 7.0 | 0.70 (0.50 to 0.90) | 2.000 | 1.50 (1.00 to 2.00) |"
    assert text.count("|") == HEAD.splitlines()[0].count("|")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_all_sides_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("llama", tmp_path)
    sizes = "--adapters 2 --rows 1,3 --rank 4 --prompt 9 --tokens 4 --rounds 1 --dtype float32"
    adapters(make_parser().parse_args(["adapters", str(tmp_path), *sizes.split(), "--peft"]))
    found = [row.split(" | ")[:3] for row in capsys.readouterr().out.splitlines()[2:]]
    both = [[str(count), str(rows)] for rows in (1, 3) for count in (0, 2)]
    assert [row[1:] for row in found] == [*both, *both]
    assert [row[0] for row in found] == ["| vsched, float32"] * 4 + ["| PEFT, float32"] * 4
