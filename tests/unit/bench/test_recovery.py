"""Lost tokens are failures of a recovery."""

from __future__ import annotations

import pytest

from tests.bench.parts.recovery import Recovery, RecoveryCase


def loss(
    case: RecoveryCase, last_s: float, *, complete: bool = True, same: bool = True
) -> Recovery:
    return Recovery(
        case=case, ends_s=[0.1, 0.2, 0.3, 0.4, last_s], complete=complete, same_tokens=same
    )


@pytest.mark.parametrize(
    ("dtype", "complete", "same", "kept"),
    [
        ("float32", True, True, True),
        ("float32", True, False, False),
        ("bfloat16", True, False, True),
        ("bfloat16", False, False, False),
    ],
)
def test_recovery_promises_the_same_tokens_in_float32(
    dtype: str, *, complete: bool, same: bool, kept: bool
) -> None:
    assert loss(RecoveryCase(dtype=dtype), 1.0, complete=complete, same=same).kept is kept
