"""Recurrent layers on a CPU: kernels in place of functions that transformers' modules call.

transformers computes a chunk of these operations in torch unless a library for GPUs is installed (`causal_conv1d`,
`mamba_ssm`, `fla`). The functions here have the signatures of that torch code. Chunks are of one sequence; single
tokens stay in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from vsched_workers.backends.cpu.kernels import recurrence as kernels
from vsched_workers.backends.cpu.kernels.bf16 import LOG2_E
from vsched_workers.backends.cpu.threads import pool_of


def convolve(
    threads: int,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """Return the causal convolution of hidden_states [1, channels, tokens] with weight [channels, taps]."""
    assert activation in (None, "silu", "swish"), f"unknown activation {activation}"
    rows = hidden_states[0].T.contiguous()
    out = torch.empty_like(rows)
    offsets = weight.new_zeros(len(weight)) if bias is None else bias
    taps = _floats(weight.T)
    kernels.convolve(
        *(pool_of(threads), _words(rows), taps, _floats(offsets)),
        *(int(activation is not None), _words(out)),
    )
    return out.T[None]


def scan_mamba(
    threads: int,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - transformers' names
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    *,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    **_: object,
) -> Any:
    """Run Mamba 2; see `kernels.scan_mamba` for the shapes, with a batch of one before them."""
    x = _floats(hidden_states[0])
    steps = dt[0].float()
    steps = steps if dt_bias is None else steps + dt_bias.float()
    steps = (functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    heads, head_dim = x.shape[1:]
    states = _states(initial_states, heads, head_dim, B.shape[-1])
    skip = torch.zeros(heads) if D is None else D
    out = torch.empty(x.shape)
    kernels.scan_mamba(
        *(pool_of(threads), x, steps.numpy(), _floats(A), _floats(B[0]), _floats(C[0])),
        *(_floats(skip), states.numpy(), out.numpy()),
    )
    return (out[None], states[None]) if return_final_states else out[None]


def scan_channels(
    threads: int,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    *,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: object,
) -> Any:
    """Run Mamba 1 over hidden_states, dt [1, channels, tokens] with B, C [1, state, tokens] and A [channels, state].

    Unlike transformers' function it continues from states [1, channels, state].
    """
    x, steps = hidden_states[0].T.float(), dt[0].T.float()
    steps = steps if delta_bias is None else steps + delta_bias.float()
    steps = functional.softplus(steps) if delta_softplus else steps
    before = None if initial_state is None else initial_state.transpose(1, 2)
    states = _states(before, *A.T.shape)
    skip = torch.zeros(len(A)) if D is None else D
    out = torch.empty(x.shape)
    kernels.scan_channels(
        *(
            pool_of(threads),
            _floats(x),
            _floats(steps),
            _floats(A.T * float(LOG2_E)),
            _floats(B[0].T),
        ),
        *(_floats(C[0].T), _floats(skip), states.numpy(), out.numpy()),
    )
    gated = out if z is None else out * functional.silu(z[0].T.float())
    scanned = gated.T[None]
    return (scanned, states.T[None]) if return_last_state else scanned


def scan_delta(
    threads: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the gated delta rule; see `kernels.scan_delta`, with a batch of one, and states [1, heads, keys, values]."""
    asked, keys = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        asked, keys = (
            each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (asked, keys)
        )
    asked = asked * asked.shape[-1] ** -0.5
    heads, values = value.shape[2:]
    before = None if initial_state is None else initial_state.transpose(2, 3)
    states = _states(before, heads, values, keys.shape[-1])
    out = torch.empty(value.shape[1:])
    kernels.scan_delta(
        *(pool_of(threads), _floats(asked), _floats(keys), _floats(value[0])),
        *(_floats(g[0]), _floats(beta[0]), states.numpy(), out.numpy()),
    )
    after = states.transpose(1, 2)[None] if output_final_state else None
    return out[None].to(query.dtype), after


def _states(before: torch.Tensor | None, *shape: int) -> torch.Tensor:
    """Return a copy of the states of one sequence, to be updated; zeros at its beginning."""
    if before is None:
        return torch.zeros(shape)
    return before[0].to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _floats(values: torch.Tensor) -> npt.NDArray[np.float32]:
    return values.detach().float().contiguous().numpy()


def _words(rows: torch.Tensor) -> npt.NDArray[Any]:
    """View rows as a kernel takes them: bfloat16 as integers."""
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


FUNCTIONS: Mapping[str, tuple[Callable[..., Any], Any]] = {
    "causal_conv1d_fn": (convolve, kernels.convolve),
    "mamba2_chunk_scan": (scan_mamba, kernels.scan_mamba),
    "mamba_selective_scan": (scan_channels, kernels.scan_channels),
    "torch_chunk_gated_delta_rule": (scan_delta, kernels.scan_delta),
}
"""The functions by transformers' names, each with its kernel."""


def warm_up(name: str, dtype: torch.dtype) -> None:
    """Compile the kernel of a function for activations of a type."""
    rows = _words(torch.zeros(1, 1, dtype=dtype))
    kernel = FUNCTIONS[name][1]
    kernel.address_of(*([rows, rows] if kernel is kernels.convolve else []))


def chunk_functions(
    names: Collection[str], dtype: torch.dtype, threads: int
) -> Mapping[str, Callable[..., Any]]:
    """Return the functions among `names`, with their kernels compiled."""
    found = [name for name in FUNCTIONS if name in names]
    for name in found:
        warm_up(name, dtype)
    return {name: functools.partial(FUNCTIONS[name][0], threads) for name in found}
