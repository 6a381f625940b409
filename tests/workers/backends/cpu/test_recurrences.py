"""The kernels of recurrent layers against transformers' torch code: chunks, as one and as two, and decode rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.jamba import modeling_jamba
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_next import modeling_qwen3_next

from vsched_workers.backends.cpu.recurrences import state_functions

TOKENS, CUT = 23, 9
HEADS, HEAD_DIM, GROUPS, STATE = 4, 18, 2, 16
CHANNELS = 70


def some(*shape: int) -> torch.Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(sum(shape)))


MAMBA = (
    *(some(TOKENS, HEADS, HEAD_DIM), some(TOKENS, HEADS), -some(HEADS)[0].abs()),
    *(some(TOKENS, GROUPS, STATE), some(TOKENS, GROUPS, STATE)),
)
MAMBA_OPTIONS: dict[str, Any] = {"D": some(HEADS)[0], "dt_bias": some(HEADS)[0], "chunk_size": 8}
MAMBA_OPTIONS |= {"dt_softplus": True, "dt_limit": (0.1, 2.0), "return_final_states": True}
CHANNELS_OF_MAMBA = (
    *(some(CHANNELS, TOKENS), some(CHANNELS, TOKENS), -some(CHANNELS, STATE)[0].abs()),
    *(some(STATE, TOKENS), some(STATE, TOKENS)),
)
CHANNELS_OPTIONS: dict[str, Any] = {"D": some(CHANNELS)[0], "delta_bias": some(CHANNELS)[0]}
CHANNELS_OPTIONS |= {"delta_softplus": True, "return_last_state": True}
DELTA = (
    *(some(TOKENS, GROUPS, STATE), some(TOKENS, GROUPS, STATE), some(TOKENS, HEADS, HEAD_DIM)),
    *(-some(TOKENS, HEADS).abs(), some(TOKENS, HEADS).sigmoid()),
)
DELTA_OPTIONS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize(
    ("module", "name", "values", "options", "dim", "state"),
    [
        (modeling_nemotron_h, "mamba2_chunk_scan", MAMBA, MAMBA_OPTIONS, 1, "initial_states"),
        (
            *(modeling_jamba, "mamba_selective_scan", CHANNELS_OF_MAMBA),
            *(CHANNELS_OPTIONS | {"z": some(CHANNELS, TOKENS)}, 2, "initial_state"),
        ),
        (
            *(modeling_qwen3_next, "torch_chunk_gated_delta_rule", DELTA),
            *(DELTA_OPTIONS, 1, "initial_state"),
        ),
    ],
)
@torch.inference_mode()
def test_scans_are_transformers_scans_and_continue(
    module: Any, name: str, values: Any, options: dict[str, Any], dim: int, state: str
) -> None:
    """Heads and channels that fill no whole piece; a number of tokens that is no multiple of four."""
    scan = state_functions([name], torch.float32, 2)[name]
    expected, after = getattr(module, name)(*values, **options)

    def scan_part(part: slice, **more: Any) -> Any:
        def cut(value: Any) -> Any:
            has_tokens = isinstance(value, torch.Tensor) and value.dim() > 2
            return value[(slice(None),) * dim + (part,)] if has_tokens else value

        return scan(
            *map(cut, values), **{key: cut(value) for key, value in options.items()}, **more
        )

    first, between = scan_part(slice(CUT))
    second, found = scan_part(slice(CUT, None), **{state: between})
    for one, other in ((torch.cat([first, second], dim), expected), (found, after)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def rows(*shape: int) -> torch.Tensor:
    """Return values of two sequences."""
    return torch.cat([some(*shape), some(*shape).flip(-1)])


def expanded(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    return values.view(*values.shape, *[1 for _ in sizes]).expand(*values.shape, *sizes)


HEAD_SIZES = {
    "D": expanded(some(HEADS)[0], HEAD_DIM),
    "dt_bias": expanded(some(HEADS)[0], HEAD_DIM),
}


@pytest.mark.parametrize(
    ("module", "name", "state", "values", "options"),
    [
        (
            *(modeling_nemotron_h, "mamba2_selective_state_update", (HEADS, HEAD_DIM, STATE)),
            (
                rows(HEADS, HEAD_DIM),
                expanded(rows(HEADS), HEAD_DIM),
                MAMBA[2],
                *[rows(GROUPS, STATE)] * 2,
            ),
            HEAD_SIZES | {"dt_softplus": True, "z": rows(HEADS, HEAD_DIM)},
        ),
        (
            *(modeling_jamba, "mamba_selective_state_update", (CHANNELS, STATE)),
            (rows(CHANNELS), rows(CHANNELS), CHANNELS_OF_MAMBA[2], *[rows(STATE)] * 2),
            {"D": some(CHANNELS)[0], "dt_softplus": True, "z": rows(CHANNELS)},
        ),
        (
            *(modeling_jamba, "causal_conv1d_update", (CHANNELS, 4)),
            (rows(CHANNELS, 1), some(CHANNELS, 4)[0], some(CHANNELS)[0]),
            {"activation": "silu"},
        ),
    ],
)
@torch.inference_mode()
def test_tokens_of_several_sequences_update_their_states(
    module: Any, name: str, state: Any, values: Any, options: dict[str, Any]
) -> None:
    if name == "mamba2_selective_state_update":
        values = (*values[:2], expanded(values[2], HEAD_DIM, STATE), *values[3:])
    # A convolution takes its state after the values of the token.
    own, reference = rows(*state), rows(*state)
    at = 1 if name == "causal_conv1d_update" else 0
    found = state_functions([name], torch.float32, 2)[name](
        *values[:at], own, *values[at:], **options
    )
    expected = getattr(module, name)(*values[:at], reference, *values[at:], **options)
    for one, other in ((found, expected), (own, reference)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "silu", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2, TOKENS])
@torch.inference_mode()
def test_convolutions_are_transformers_convolutions(
    tokens: int, dtype: torch.dtype, activation: str | None
) -> None:
    name = "causal_conv1d_fn"
    weight = some(CHANNELS, 4)[0], some(CHANNELS)[0]
    given = [each.to(dtype) for each in (some(CHANNELS, tokens), *weight)]
    found = state_functions([name], dtype, 2)[name](*given, activation=activation)
    expected = getattr(modeling_jamba, name)(*map(torch.Tensor.float, given), activation=activation)
    assert found.dtype == dtype
    within = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.float(), expected, rtol=within, atol=1e-5)
