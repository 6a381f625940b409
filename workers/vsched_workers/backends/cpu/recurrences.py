"""Recurrent layers on a CPU: kernels in place of functions that transformers' modules call.

transformers computes a chunk of these operations in torch unless a library for GPUs is installed (`causal_conv1d`,
`mamba_ssm`, `fla`). The functions here have the signatures of that torch code. Chunks are of one sequence; decode
rows are one token of each of several.
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

SILU = ("silu", "swish")
"""Transformers' names of silu."""


def convolve(
    threads: int,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """Return the causal convolution of hidden_states [1, channels, tokens] with weight [channels, taps]."""
    rows = hidden_states[0].T.contiguous()
    out = torch.empty_like(rows)
    kernels.convolve(
        *(pool_of(threads), _words(rows), _floats(weight.T), _or_zeros(bias, len(weight))),
        *(int(activation in SILU), _words(out)),
    )
    return _activated(out, activation).T[None]


def update_convolution(
    threads: int,
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Return the convolution of one token of each sequence [sequences, channels, 1]; updates their last inputs."""
    inputs, rows = conv_state.contiguous(), hidden_states[..., 0].contiguous()
    out = torch.empty_like(rows)
    kernels.convolve_token(
        *(pool_of(threads), _words(rows), _words(inputs), _floats(weight)),
        *(_or_zeros(bias, len(weight)), int(activation in SILU), _words(out)),
    )
    if inputs is not conv_state:
        conv_state.copy_(inputs)
    return _activated(out, activation)[..., None]


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
    in_place: bool = False,
    **_: object,
) -> Any:
    """Run Mamba 2; see `kernels.scan_mamba` for the shapes. With `in_place`, `initial_states` are updated."""
    sequences, _tokens, heads, head_dim = hidden_states.shape
    states = initial_states
    if states is None or not in_place:
        states = _states(initial_states, sequences, heads, head_dim, B.shape[-1])
    steps = _time_steps(dt, dt_bias, softplus=dt_softplus).clamp(*dt_limit)
    out = torch.empty(hidden_states.shape)
    kernels.scan_mamba(
        *(pool_of(threads), _floats(hidden_states), _floats(steps), _floats(A), _floats(B)),
        *(_floats(C), _or_zeros(D, heads), states.numpy(), out.numpy()),
    )
    return (out, states) if return_final_states else out


def update_mamba(
    threads: int,
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Run Mamba 2 for one token of each sequence; all heads' parameters are expanded by their sizes."""
    out = scan_mamba(
        *(threads, hidden_states[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None]),
        D=None if D is None else D[:, 0],
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        initial_states=state,
        in_place=True,
        **options,
    )
    return _gated(out[:, 0], z).to(hidden_states.dtype)


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
    """Run Mamba 1 over hidden_states, dt, z [sequences, channels, tokens] with B, C [sequences, state, tokens].

    Unlike transformers' function it continues from states, [sequences, channels, state]. A is [channels, state].
    """
    x = hidden_states.transpose(1, 2).float()
    steps = _time_steps(dt.transpose(1, 2), delta_bias, softplus=delta_softplus)
    before = None if initial_state is None else initial_state.transpose(1, 2)
    states = _states(before, len(x), *A.T.shape)
    out = torch.empty(x.shape)
    kernels.scan_channels(
        *(pool_of(threads), _floats(x), _floats(steps), _floats(A.T * float(LOG2_E))),
        *(_floats(B.transpose(1, 2)), _floats(C.transpose(1, 2)), _or_zeros(D, len(A))),
        *(states.numpy(), out.numpy()),
    )
    scanned = _gated(out.transpose(1, 2), z)
    return (scanned, states.transpose(1, 2)) if return_last_state else scanned


def update_channels(
    threads: int,
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    dt_softplus: bool = False,
    **_: object,
) -> torch.Tensor:
    """Run Mamba 1 for one token of each sequence."""
    out, after = scan_channels(
        *(threads, hidden_states[..., None], dt[..., None], A, B[..., None], C[..., None], D),
        z=None if z is None else z[..., None],
        delta_bias=dt_bias,
        initial_state=state,
        delta_softplus=dt_softplus,
        return_last_state=True,
    )
    state.copy_(after)
    result: torch.Tensor = out[..., 0].to(hidden_states.dtype)
    return result


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
    """Run the gated delta rule; see `kernels.scan_delta`, but states are [sequences, heads, keys, values]."""
    asked, keys = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        asked, keys = (
            each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (asked, keys)
        )
    asked = asked * asked.shape[-1] ** -0.5
    sequences, _tokens, heads, values = value.shape
    before = None if initial_state is None else initial_state.transpose(2, 3)
    states = _states(before, sequences, heads, values, keys.shape[-1])
    out = torch.empty(value.shape)
    kernels.scan_delta(
        *(pool_of(threads), _floats(asked), _floats(keys), _floats(value), _floats(g)),
        *(_floats(beta), states.numpy(), out.numpy()),
    )
    after = states.transpose(2, 3) if output_final_state else None
    return out.to(query.dtype), after


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    """Return the time steps of Mamba in float32."""
    steps = dt.float() if bias is None else dt.float() + bias.float()
    return functional.softplus(steps) if softplus else steps


def _gated(out: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
    return out if z is None else out * functional.silu(z.float())


def _activated(values: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Apply an activation that kernels lack."""
    if activation is None or activation in SILU:
        return values
    from transformers.activations import ACT2FN

    activated: torch.Tensor = ACT2FN[activation](values)
    return activated


def _states(before: torch.Tensor | None, *shape: int) -> torch.Tensor:
    """Return a copy of states, to be updated; zeros at the beginning of a sequence."""
    if before is None:
        return torch.zeros(shape)
    return before.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _floats(values: torch.Tensor) -> npt.NDArray[np.float32]:
    return values.detach().float().contiguous().numpy()


def _or_zeros(values: torch.Tensor | None, size: int) -> npt.NDArray[np.float32]:
    return np.zeros(size, np.float32) if values is None else _floats(values)


def _words(rows: torch.Tensor) -> npt.NDArray[Any]:
    """View rows as a kernel takes them: bfloat16 as integers."""
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


FUNCTIONS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "causal_conv1d_fn": (convolve, "convolve"),
    "causal_conv1d_update": (update_convolution, "convolve_token"),
    "mamba2_chunk_scan": (scan_mamba, "scan_mamba"),
    "mamba2_selective_state_update": (update_mamba, "scan_mamba"),
    "mamba_selective_scan": (scan_channels, "scan_channels"),
    "mamba_selective_state_update": (update_channels, "scan_channels"),
    "torch_chunk_gated_delta_rule": (scan_delta, "scan_delta"),
    "torch_recurrent_gated_delta_rule": (scan_delta, "scan_delta"),
}
"""The functions by transformers' names, each with the name of its kernel."""

KERNELS = frozenset(kernel for _, kernel in FUNCTIONS.values())


def warm_up(name: str, dtype: torch.dtype) -> None:
    """Compile a kernel for activations of a type."""
    rows, inputs = (_words(torch.zeros(shape, dtype=dtype)) for shape in ((1, 1), (1, 1, 1)))
    given = {"convolve": [rows, rows], "convolve_token": [rows, inputs, rows]}
    getattr(kernels, name).address_of(*given.get(name, []))


def state_functions(
    names: Collection[str], dtype: torch.dtype, threads: int
) -> Mapping[str, Callable[..., Any]]:
    """Return the functions among `names`, with their kernels compiled."""
    found = {name: FUNCTIONS[name] for name in FUNCTIONS if name in names}
    for kernel in {kernel for _, kernel in found.values()}:
        warm_up(kernel, dtype)
    return {name: functools.partial(function, threads) for name, (function, _) in found.items()}
