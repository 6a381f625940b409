"""Recurrences over the tokens of sequences, and the causal convolution before them.

Mamba 2, for each head with a state H [head_dim, state]:

    H <- exp(dt a) H + dt x B^T,   y = H C + d x

Mamba 1, for each channel with a state h [state]:

    h <- exp(dt a) h + dt x B,   y = h C + d x

Gated delta rule, for each head with a state S [values, keys]:

    S <- exp(g) S,   S <- S + beta (v - S k) k^T,   y = S q

All run token by token. The rows of a state are independent, so the rows of a piece stay in the first-level cache for
all tokens. Equivalent matrix products over chunks of tokens have as many operations, and write a value for each pair of
tokens and head to memory, several times. Computed in float32.

Source: Gu and Dao, "Mamba" (2023); Dao and Gu, "Transformers are SSMs" (2024); Yang et al., "Gated Delta Networks"
(2025).
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np

from vsched_workers.backends.cpu.kernels.activation import silu
from vsched_workers.backends.cpu.kernels.bf16 import as_type_of, exp, exp2, widen
from vsched_workers.backends.cpu.kernels.compilation import LONG, array_of, compiled, kernel
from vsched_workers.backends.cpu.kernels.thread_pool import rows_together, spread

ROWS = 16
"""Rows of a state in a piece: at most 16 KiB."""

CHANNELS = 64
"""Channels of Mamba 1 in a piece."""

_TOGETHER = 4
"""Tokens of Mamba for which a row is read once."""

_VECTOR, _MATRIX, _CUBE, _CUBES = (array_of(np.float32, each) for each in (1, 2, 3, 4))


@compiled()
def _row_of_mamba(state: Any, decay: Any, x: Any, b: Any, c: Any, sums: Any) -> None:
    """Advance one row of a state by four tokens; `sums` are its products with C."""
    decay0, decay1, decay2, decay3 = decay[0], decay[1], decay[2], decay[3]
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    b0, b1, b2, b3 = b
    c0, c1, c2, c3 = c
    sum0 = sum1 = sum2 = sum3 = np.float32(0.0)
    for index in range(len(state)):
        value = state[index] * decay0 + x0 * b0[index]
        sum0 += value * c0[index]
        value = value * decay1 + x1 * b1[index]
        sum1 += value * c1[index]
        value = value * decay2 + x2 * b2[index]
        sum2 += value * c2[index]
        value = value * decay3 + x3 * b3[index]
        sum3 += value * c3[index]
        state[index] = value
    sums[0], sums[1], sums[2], sums[3] = sum0, sum1, sum2, sum3


@compiled()
def _rows_of_mamba(
    piece: int, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, states: Any, out: Any
) -> None:
    tokens, heads, head_dim = x.shape
    parts = -(-head_dim // ROWS)
    head, first = piece // parts, piece % parts * ROWS
    group = head // (heads // b.shape[1])
    decay, scaled, sums = np.empty(4, np.float32), np.empty(4, np.float32), np.empty(4, np.float32)
    for start in range(0, tokens, _TOGETHER):
        count = min(_TOGETHER, tokens - start)
        # With a decay of one and an input of zero, a token beyond the last one changes nothing.
        decay[:], scaled[:] = np.float32(1.0), np.float32(0.0)
        for index in range(count):
            decay[index] = exp(dt[start + index, head] * a[head])
        last = tokens - 1
        at1, at2, at3 = min(start + 1, last), min(start + 2, last), min(start + 3, last)
        own_b = b[start, group], b[at1, group], b[at2, group], b[at3, group]
        own_c = c[start, group], c[at1, group], c[at2, group], c[at3, group]
        for row in range(first, min(first + ROWS, head_dim)):
            for index in range(count):
                scaled[index] = x[start + index, head, row] * dt[start + index, head]
            _row_of_mamba(states[head, row], decay, scaled, own_b, own_c, sums)
            for index in range(count):
                skipped = d[head] * x[start + index, head, row]
                out[start + index, head, row] = sums[index] + skipped


@kernel(LONG, _CUBES, _CUBE, _VECTOR, _CUBES, _CUBES, _VECTOR, _CUBES, _CUBES)
def scan_mamba(
    pool: int, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, states: Any, out: Any
) -> None:
    """Run Mamba 2 over the tokens of some sequences; updates their states.

    Shape: x, out [sequences, tokens, heads, head_dim]; dt [sequences, tokens, heads]; a, d [heads]; b, c [sequences,
    tokens, groups, state]; states [sequences, heads, head_dim, state].
    """
    pieces = x.shape[2] * -(-x.shape[3] // ROWS)
    for one in range(len(x)):
        arguments = x[one], dt[one], a, b[one], c[one], d, states[one], out[one]
        spread(pool, pieces, 1, _rows_of_mamba, arguments)


@compiled()
def _add_state(state: Any, a: Any, dt: Any, x: Any, b: Any, c: Any, sums: Any) -> None:
    """Advance one value of the states of some channels by one token; add its products with C to `sums`."""
    for index in range(len(state)):
        value = state[index] * exp2(dt[index] * a[index]) + dt[index] * x[index] * b
        sums[index] += value * c
        state[index] = value


@compiled()
def _channels(
    piece: int, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, states: Any, out: Any
) -> None:
    first = piece * CHANNELS
    own = slice(first, min(first + CHANNELS, x.shape[1]))
    for token in range(len(x)):
        steps, inputs, sums = dt[token, own], x[token, own], out[token, own]
        sums[:] = d[own] * inputs
        for index in range(len(states)):
            its_b, its_c = b[token, index], c[token, index]
            _add_state(states[index, own], a[index, own], steps, inputs, its_b, its_c, sums)


@kernel(LONG, _CUBE, _CUBE, _MATRIX, _CUBE, _CUBE, _VECTOR, _CUBE, _CUBE)
def scan_channels(
    pool: int, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, states: Any, out: Any
) -> None:
    """Run Mamba 1 over the tokens of some sequences; updates their states.

    Shape: x, dt, out [sequences, tokens, channels]; a [state, channels], times log2(e), not positive; b, c [sequences,
    tokens, state]; d [channels]; states [sequences, state, channels].
    """
    pieces = -(-x.shape[2] // CHANNELS)
    for one in range(len(x)):
        arguments = x[one], dt[one], a, b[one], c[one], d, states[one], out[one]
        spread(pool, pieces, 1, _channels, arguments)


@compiled()
def _row_of_delta(state: Any, decay: Any, key: Any, value: Any, beta: Any, query: Any) -> Any:
    """Advance one row of a state by one token; return its product with the query."""
    known = np.float32(0.0)
    for index in range(len(state)):
        known += state[index] * key[index]
    change = beta * (value - decay * known)
    total = np.float32(0.0)
    for index in range(len(state)):
        new = state[index] * decay + change * key[index]
        total += new * query[index]
        state[index] = new
    return total


@compiled()
def _rows_of_delta(
    piece: int, query: Any, key: Any, value: Any, g: Any, beta: Any, states: Any, out: Any
) -> None:
    tokens, heads, values = value.shape
    parts = -(-values // ROWS)
    head, first = piece // parts, piece % parts * ROWS
    key_head = head // (heads // key.shape[1])
    for token in range(tokens):
        decay, own_beta = exp(g[token, head]), beta[token, head]
        own_key, own_query = key[token, key_head], query[token, key_head]
        for row in range(first, min(first + ROWS, values)):
            out[token, head, row] = _row_of_delta(
                states[head, row], decay, own_key, value[token, head, row], own_beta, own_query
            )


@kernel(LONG, _CUBES, _CUBES, _CUBES, _CUBE, _CUBE, _CUBES, _CUBES)
def scan_delta(
    pool: int, query: Any, key: Any, value: Any, g: Any, beta: Any, states: Any, out: Any
) -> None:
    """Run the gated delta rule over the tokens of some sequences; updates their states.

    Shape: query, key [sequences, tokens, key heads, keys]; value, out [sequences, tokens, heads, values]; g, beta
    [sequences, tokens, heads]; states [sequences, heads, values, keys].
    """
    pieces = value.shape[2] * -(-value.shape[3] // ROWS)
    for one in range(len(value)):
        arguments = query[one], key[one], value[one], g[one], beta[one], states[one], out[one]
        spread(pool, pieces, 1, _rows_of_delta, arguments)


@compiled()
def _convolve_row(token: int, x: Any, weight: Any, bias: Any, activates: int, out: Any) -> None:
    taps, channels = weight.shape
    sums = np.empty(channels, np.float32)
    sums[:] = bias
    for tap in range(max(taps - 1 - token, 0), taps):
        row, factors = x[token - taps + 1 + tap], weight[tap]
        for channel in range(channels):
            sums[channel] += widen(row[channel]) * factors[channel]
    own = out[token]
    if activates:
        for channel in range(channels):
            own[channel] = as_type_of(own[channel], silu(sums[channel]))
    else:
        for channel in range(channels):
            own[channel] = as_type_of(own[channel], sums[channel])


@kernel(LONG, None, _MATRIX, _VECTOR, LONG, None)
def convolve(pool: int, x: Any, weight: Any, bias: Any, activates: int, out: Any) -> None:
    """Convolve each channel with its own weights, causally; with `activates`, apply silu.

    Shape: x, out [tokens, channels], bfloat16 or float32; weight [taps, channels], the last one for the token itself;
    bias [channels].
    """
    grain = rows_together(weight.shape[0] * weight.shape[1])
    spread(pool, len(x), grain, _convolve_row, (x, weight, bias, activates, out))


@compiled()
def _convolve_token(
    one: int, x: Any, inputs: Any, weight: Any, bias: Any, activates: int, out: Any
) -> None:
    channels, taps = weight.shape
    for channel in range(channels):
        total, own = bias[channel], inputs[one, channel]
        for tap in range(taps - 1):
            own[tap] = own[tap + 1]
            total += widen(own[tap]) * weight[channel, tap]
        own[taps - 1] = x[one, channel]
        total += widen(own[taps - 1]) * weight[channel, taps - 1]
        out[one, channel] = as_type_of(x[one, channel], silu(total) if activates else total)


@kernel(LONG, None, None, _MATRIX, _VECTOR, LONG, None)
def convolve_token(
    pool: int, x: Any, inputs: Any, weight: Any, bias: Any, activates: int, out: Any
) -> None:
    """Convolve one token of each of some sequences, and append it to their last inputs.

    Shape: x, out [sequences, channels], inputs [sequences, channels, taps], bfloat16 or float32; weight [channels,
    taps]; bias [channels].
    """
    grain = rows_together(weight.shape[0] * weight.shape[1])
    spread(pool, len(x), grain, _convolve_token, (x, inputs, weight, bias, activates, out))
