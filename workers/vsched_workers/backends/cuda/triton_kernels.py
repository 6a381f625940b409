"""The Triton kernels; imported on CUDA only, where torch includes Triton.

**Decode attention.** A row of a decode step reads its whole context, and a context that is read by one program keeps
one SM busy while all others wait for it. So a context is read in parallel parts, and a second kernel reduces them. A
context has `usual_parts` parts, which keep all SMs busy if all contexts are equally long. A part is at least
`PART_TOKENS_MIN` tokens long, and at most `PART_TOKENS_MAX` as long as enough parts were launched: so a long context
among many short ones is spread over SMs, too, and a captured step serves contexts of any length. Programs for parts
beyond the context's end return at once. Prior art: Flash-Decoding (Dao et al., 2023) for the parts, PagedAttention
(SOSP 2023) for the block tables.

**Between the products of a layer**, each kernel does in one pass over the rows the work of five to ten kernels of
transformers' modules. They round at the same points: the residual sum, the normalized row before its weights, and the
activation before the product with up; in vision towers also rotated queries and keys.

**Quantized weights.** For small M, activations are multiplied by the quantized values: an integer or an FP8 value is
exact in 16 bits, and scales are applied once per sum over a group, so only the sum is rounded. For large M arithmetic
dominates, and the weight is dequantized once for torch's product.
"""

# Triton compiles these functions: to a type checker they are untyped, and an annotation other than Triton's own is a
# global variable that no kernel may read.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

PART_TOKENS_MIN: tl.constexpr = tl.constexpr(64)
PART_TOKENS_MAX: tl.constexpr = tl.constexpr(1024)


@triton.jit
def tokens_of_part(  # noqa: ANN201
    context,
    parts,
    usual_parts,
    TOKENS: tl.constexpr,  # noqa: N803  # Triton's marker of compile-time constants
):
    """Return the number of tokens in each part of a context, a multiple of TOKENS."""
    tiles = tl.cdiv(context, TOKENS)
    usual = tl.cdiv(tiles, usual_parts) * TOKENS
    usual = tl.minimum(tl.maximum(usual, PART_TOKENS_MIN), PART_TOKENS_MAX)
    return tl.maximum(tl.cdiv(tiles, parts) * TOKENS, usual)


@triton.jit
def decode_parts(
    query,
    keys,
    values,
    tables,
    contexts,
    summed_parts,
    highest_parts,
    total_parts,
    scaling,
    window,
    softcap,
    table_stride,
    parts,
    usual_parts,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    GROUP_ROWS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIMS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    WINDOWED: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
) -> None:
    """Attend to one part of a context for the query heads of one row that share one key head.

    Shape: query [rows, KV_HEADS * GROUP, HEAD_DIM]; keys [slots, KV_HEADS, HEAD_DIM]; values [slots, KV_HEADS,
    VALUE_DIM]; tables [rows, blocks]; summed_parts float32 [rows, heads, parts, VALUE_DIM]; highest_parts and
    total_parts float32 [rows, heads, parts]. GROUP_ROWS, DIMS and VALUE_DIMS are GROUP, HEAD_DIM and VALUE_DIM, rounded
    up to powers of two; TOKENS divides PART_TOKENS_MIN.

    If WINDOWED, the context is its last `window` tokens; if CAPPED, scores are bounded by `softcap`.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    heads = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIMS)
    value_dims = tl.arange(0, VALUE_DIMS)
    offsets = tl.arange(0, TOKENS)
    context = tl.load(contexts + row)
    start_of_all = 0
    if WINDOWED:
        start_of_all = tl.maximum(context - window, 0)
    per_part = tokens_of_part(context - start_of_all, parts, usual_parts, TOKENS)
    first = start_of_all + part * per_part
    if first >= context:
        return
    length = tl.minimum(context, first + per_part)
    head = (row * KV_HEADS + kv_head) * GROUP + heads
    real = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(query + head[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0)
    highest = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    summed = tl.zeros([GROUP_ROWS, VALUE_DIMS], tl.float32)
    for start in range(first, length, TOKENS):
        position = start + offsets
        seen = position < length
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, mask=seen, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        cell = (slot * KV_HEADS + kv_head)[:, None]
        held = seen[:, None] & (dims < HEAD_DIM)[None, :]
        # A key or value is read once, and must not displace the weights that follow from the L2 cache.
        key = tl.load(
            keys + cell * HEAD_DIM + dims[None, :],
            mask=held,
            other=0.0,
            eviction_policy="evict_first",
        )
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scaling
        if CAPPED:  # tanh by the sigmoid
            scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(highest - higher)
        value = tl.load(
            values + cell * VALUE_DIM + value_dims[None, :],
            mask=seen[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        total = total * faded + tl.sum(weights, axis=1)
        summed = summed * faded[:, None] + tl.dot(
            weights.to(value.dtype), value, input_precision="ieee"
        )
        highest = higher
    at = head * parts + part
    written = (heads < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(summed_parts + at[:, None] * VALUE_DIM + value_dims[None, :], summed, mask=written)
    tl.store(highest_parts + at, highest, mask=heads < GROUP)
    tl.store(total_parts + at, total, mask=heads < GROUP)


@triton.jit
def merge_parts(
    contexts,
    summed_parts,
    highest_parts,
    total_parts,
    sinks,
    out,
    window,
    heads,
    parts,
    usual_parts,
    PARTS: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIMS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    WINDOWED: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
) -> None:
    """Combine the results of a context's parts for one query head of one row.

    Shape: as in `decode_parts`; sinks [heads], of any type; out [rows, heads, VALUE_DIM]; one program per row and head.
    """
    head = tl.program_id(0)
    part = tl.arange(0, PARTS)
    dims = tl.arange(0, VALUE_DIMS)
    context = tl.load(contexts + head // heads)
    if WINDOWED:
        context = tl.minimum(context, window)
    per_part = tokens_of_part(context, parts, usual_parts, TOKENS)
    there = part * per_part < context
    highest = tl.load(highest_parts + head * parts + part, mask=there, other=-float("inf"))
    most = tl.max(highest, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + head % heads).to(tl.float32)
        most = tl.maximum(most, sink)
    weights = tl.exp(highest - most)
    total = tl.load(total_parts + head * parts + part, mask=there, other=0.0)
    cells = (head * parts + part)[:, None] * VALUE_DIM + dims[None, :]
    held = there[:, None] & (dims < VALUE_DIM)[None, :]
    summed = tl.load(summed_parts + cells, mask=held, other=0.0)
    whole = tl.sum(total * weights, axis=0)
    if HAS_SINKS:
        whole += tl.exp(sink - most)
    result = tl.sum(summed * weights[:, None], axis=0) / whole
    tl.store(out + head * VALUE_DIM + dims, result.to(out.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit
def add_norm(
    hidden,
    added,
    weight,
    normed,
    width,
    eps,
    HAS_ADDED: tl.constexpr,  # noqa: N803  # see triton_kernels.py
    WIDTH: tl.constexpr,  # noqa: N803
) -> None:
    """Add to a row, and write its RMS norm.

    Shape: hidden, added and normed [rows, width], weight [width]; WIDTH is `width`, rounded up to a power of two.
    """
    place = tl.arange(0, WIDTH)
    there = place < width
    at = tl.program_id(0).to(tl.int64) * width + place
    row = tl.load(hidden + at, mask=there, other=0.0)
    if HAS_ADDED:
        row += tl.load(added + at, mask=there, other=0.0)
        tl.store(hidden + at, row, mask=there)
    wide = row.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    rounded = (wide * scale).to(row.dtype)
    tl.store(normed + at, rounded * tl.load(weight + place, mask=there, other=0.0), mask=there)


@triton.jit
def rotate_and_store(
    qkv,
    cos,
    sin,
    slots,
    query_weight,
    key_weight,
    queries,
    keys,
    values,
    eps,
    HEADS: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    NORMS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
) -> None:
    """Normalize (if NORMS) and rotate one head of one row; keys and values go to the cache, keys also in place.

    Shape: qkv [rows, (HEADS + 2 * KV_HEADS) * 2 * HALF]; cos and sin [rows, HALF]; slots int64 [rows]; weights [2 *
    HALF]; queries [rows, HEADS, 2 * HALF]; keys and values [slots, KV_HEADS, 2 * HALF]. DIMS is HALF, rounded up to a
    power of two.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, DIMS)
    there = place < HALF
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + place
    first = tl.load(source, mask=there, other=0.0)
    second = tl.load(source + HALF, mask=there, other=0.0)
    slot = tl.load(slots + row) * KV_HEADS
    if head >= HEADS + KV_HEADS:
        kept = values + (slot + head - HEADS - KV_HEADS) * 2 * HALF + place
        tl.store(kept, first, mask=there)
        tl.store(kept + HALF, second, mask=there)
    else:
        if NORMS:
            weight = (query_weight if head < HEADS else key_weight) + place
            left, right = first.to(tl.float32), second.to(tl.float32)
            squares = tl.sum(left * left + right * right, axis=0)
            scale = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
            first = (left * scale).to(first.dtype) * tl.load(weight, mask=there, other=0.0)
            second = (right * scale).to(second.dtype) * tl.load(
                weight + HALF, mask=there, other=0.0
            )
        cosine = tl.load(cos + row * HALF + place, mask=there, other=0.0).to(tl.float32)
        sine = tl.load(sin + row * HALF + place, mask=there, other=0.0).to(tl.float32)
        left, right = first.to(tl.float32), second.to(tl.float32)
        turned = (left * cosine - right * sine).to(first.dtype)
        other = (right * cosine + left * sine).to(first.dtype)
        if head < HEADS:
            made = queries + (row * HEADS + head) * 2 * HALF + place
            tl.store(made, turned, mask=there)
            tl.store(made + HALF, other, mask=there)
        else:
            kept = keys + (slot + head - HEADS) * 2 * HALF + place
            tl.store(kept, turned, mask=there)
            tl.store(kept + HALF, other, mask=there)
            tl.store(source, turned, mask=there)
            tl.store(source + HALF, other, mask=there)


@triton.jit
def activated(  # noqa: ANN201
    wide,
    ACTIVATION: tl.constexpr,  # noqa: N803
):
    """Return the activation of float32 values; ACTIVATION is a name of `families.decoder.Activation`."""
    if ACTIVATION == "SILU":
        opened = wide / (1.0 + tl.exp(-wide))
    elif ACTIVATION == "GELU":
        opened = wide * 0.5 * (1.0 + tl.erf(wide * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        opened = wide / (1.0 + tl.exp(-2.0 * inner))
    return opened


@triton.jit
def gate(
    gate_up,
    gated,
    width,
    ACTIVATION: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
) -> None:
    """Write the activation of a row's first half (gate) times its second half (up).

    Shape: gate_up [rows, 2 * width], gated [rows, width]; ACTIVATION is a name of `families.decoder.Activation`.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = place < width
    source = gate_up + row * 2 * width + place
    given = tl.load(source, mask=there, other=0.0)
    opened = activated(given.to(tl.float32), ACTIVATION)
    up = tl.load(source + width, mask=there, other=0.0)
    tl.store(gated + row * width + place, opened.to(given.dtype) * up, mask=there)


@triton.jit
def multiply_row(
    row,
    weight,
    bias,
    out,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,  # noqa: N803  # see triton_kernels.py
    ACTIVATION: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
) -> None:
    """Multiply one row by OUTPUTS rows of a weight, without tensor cores: reading the weight takes all the time.

    With an ACTIVATION, which is a name of `families.decoder.Activation`, the weight has a gate and an up part, and the
    result is the activation of the first product times the second.

    Shape: row [inputs]; weight [outputs, inputs], with ACTIVATION [2 * outputs, inputs]; bias and out [outputs].
    OUTPUTS divides outputs, and TILE divides inputs.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, TILE)
    at = output.to(tl.int64)[:, None] * inputs + place[None, :]
    up_at = at + outputs.to(tl.int64) * inputs
    summed = tl.zeros([OUTPUTS, TILE], tl.float32)
    up_summed = tl.zeros([OUTPUTS, TILE], tl.float32)
    for start in tl.range(0, inputs, TILE, num_stages=STAGES):
        given = tl.load(row + start + place).to(tl.float32)[None, :]
        summed += tl.load(weight + at + start).to(tl.float32) * given
        if ACTIVATION is not None:
            up_summed += tl.load(weight + up_at + start).to(tl.float32) * given
    made = tl.sum(summed, axis=1)
    kind = out.dtype.element_ty
    if HAS_BIAS:
        made += tl.load(bias + output).to(tl.float32)
    if ACTIVATION is None:
        tl.store(out + output, made.to(kind))
    else:
        up = tl.sum(up_summed, axis=1).to(kind)
        opened = activated(made.to(kind).to(tl.float32), ACTIVATION)
        tl.store(out + output, opened.to(kind) * up)


@triton.jit
def fp8_values(bits):  # noqa: ANN201
    """Return FP8 (e4m3) values as float16, by the bits; for devices without an instruction for it."""
    half = ((bits & 128).to(tl.uint16) << 8) | ((bits & 127).to(tl.uint16) << 7)
    return half.to(tl.float16, bitcast=True) * 256.0  # the exponents' biases are 7 and 15


@triton.jit
def fp4_values(bits):  # noqa: ANN201
    """Return FP4 (e2m1) values in halves, as float16, by the bits."""
    half = ((bits & 8).to(tl.uint16) << 12) | ((bits & 7).to(tl.uint16) << 9)
    return half.to(tl.float16, bitcast=True) * 32768.0  # the exponents' biases are 1 and 15


@triton.jit
def multiply_few(
    rows,
    values,
    scales,
    offsets,
    sums,
    count,
    outputs,
    inputs,
    bytes_of_one,
    group,
    groups,
    part_tiles,
    KIND: tl.constexpr,  # noqa: N803  # see triton_kernels.py
    FOUR_BITS: tl.constexpr,  # noqa: N803
    CENTRE: tl.constexpr,  # noqa: N803
    HAS_OFFSETS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Multiply a block of rows by a block of outputs over one split of the inputs.

    Shape: rows [count, inputs]; values uint8 [outputs, bytes_of_one], of 4 bits with the first of two inputs in the low
    nibble; scales and offsets [outputs, groups]; sums float32 [parts, count, outputs]. TILE divides `group`; a split
    has `part_tiles` tiles.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    real, requested = output < outputs, row < count
    line = output.to(tl.int64)[:, None]
    summed = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = part * part_tiles * TILE
    last = tl.minimum(inputs, first + part_tiles * TILE)
    for start in range(first, last, TILE):
        place = start + tl.arange(0, TILE)
        there = requested[None, :] & (place < inputs)[:, None]
        given = tl.load(rows + row[None, :] * inputs + place[:, None], mask=there, other=0.0)
        # A byte contains two values of 4 bits.
        byte = start // 2 + tl.arange(0, TILE // 2) if FOUR_BITS else place
        held = real[:, None] & (byte < bytes_of_one)[None, :]
        bits = tl.load(values + line * bytes_of_one + byte[None, :], mask=held, other=0)
        if FOUR_BITS:
            bits = tl.join(bits & 15, bits >> 4).reshape(OUTPUTS, TILE)
        if KIND == "int4":
            weight = bits.to(given.dtype) - CENTRE
        elif KIND == "fp4":
            weight = fp4_values(bits).to(given.dtype)
        elif KIND == "fp8":
            weight = bits.to(tl.float8e4nv, bitcast=True).to(given.dtype)
        elif KIND == "fp8 bits":
            weight = fp8_values(bits).to(given.dtype)
        else:
            weight = bits.to(tl.int8, bitcast=True).to(given.dtype)
        cell = output.to(tl.int64) * groups + start // group
        scale = tl.load(scales + cell, mask=real, other=0.0).to(tl.float32)
        summed += tl.dot(weight, given, input_precision="ieee") * scale[:, None]
        if HAS_OFFSETS:
            offset = tl.load(offsets + cell, mask=real, other=0.0).to(tl.float32)
            summed += offset[:, None] * tl.sum(given.to(tl.float32), axis=0)[None, :]
    at = (part * count + row).to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(sums + at, summed, mask=real[:, None] & requested[None, :])


@triton.jit
def widen(
    values,
    scales,
    offsets,
    weight,
    inputs,
    bytes_of_one,
    group,
    groups,
    KIND: tl.constexpr,  # noqa: N803
    FOUR_BITS: tl.constexpr,  # noqa: N803
    CENTRE: tl.constexpr,  # noqa: N803
    HAS_OFFSETS: tl.constexpr,  # noqa: N803
    INPUTS: tl.constexpr,  # noqa: N803
) -> None:
    """Dequantize some values of one output, in the type of `weight` [outputs, inputs]; shapes as above."""
    output = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    there = place < inputs
    byte = place // 2 if FOUR_BITS else place
    bits = tl.load(values + output * bytes_of_one + byte, mask=there, other=0)
    if FOUR_BITS:
        bits = (bits >> ((place % 2) * 4).to(tl.uint8)) & 15
    if KIND == "int4":
        made = bits.to(tl.float32) - CENTRE
    elif KIND == "fp4":
        made = fp4_values(bits).to(tl.float32)
    elif KIND == "fp8":
        made = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == "fp8 bits":
        made = fp8_values(bits).to(tl.float32)
    else:
        made = bits.to(tl.int8, bitcast=True).to(tl.float32)
    cell = output * groups + place // group
    made *= tl.load(scales + cell, mask=there, other=0.0).to(tl.float32)
    if HAS_OFFSETS:
        made += tl.load(offsets + cell, mask=there, other=0.0).to(tl.float32)
    tl.store(weight + output * inputs + place, made.to(weight.dtype.element_ty), mask=there)


@triton.jit
def add_layer_norm(
    hidden,
    added,
    weight,
    bias,
    normed,
    width,
    eps,
    HAS_ADDED: tl.constexpr,  # noqa: N803  # see triton_kernels.py
    WIDTH: tl.constexpr,  # noqa: N803
) -> None:
    """Add to a row, and write its layer norm.

    Shape: as `triton_layers.add_norm`; bias [width].
    """
    place = tl.arange(0, WIDTH)
    there = place < width
    at = tl.program_id(0).to(tl.int64) * width + place
    row = tl.load(hidden + at, mask=there, other=0.0)
    if HAS_ADDED:
        row += tl.load(added + at, mask=there, other=0.0)
        tl.store(hidden + at, row, mask=there)
    wide = row.to(tl.float32)
    centred = tl.where(there, wide - tl.sum(wide, axis=0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    weights = tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + place, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + at, (centred * scale * weights + shift).to(row.dtype), mask=there)


@triton.jit
def rotate_patches(
    qkv,
    cos,
    sin,
    HEADS: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
) -> None:
    """Rotate the queries and keys of one row in place.

    Shape: qkv [rows, 3 * HEADS * 2 * HALF]; cos and sin float32 [rows, HALF]. PAIRS and DIMS are 2 * HEADS and HALF,
    rounded up to powers of two.
    """
    row = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, PAIRS), tl.arange(0, DIMS)
    within = place < HALF
    there = (head < 2 * HEADS)[:, None] & within[None, :]
    source = qkv + row * 6 * HEADS * HALF + head[:, None] * 2 * HALF + place[None, :]
    first = tl.load(source, mask=there, other=0.0)
    second = tl.load(source + HALF, mask=there, other=0.0)
    cosine = tl.load(cos + row * HALF + place, mask=within, other=0.0)[None, :]
    sine = tl.load(sin + row * HALF + place, mask=within, other=0.0)[None, :]
    left, right = first.to(tl.float32), second.to(tl.float32)
    tl.store(source, (left * cosine - right * sine).to(first.dtype), mask=there)
    tl.store(source + HALF, (right * cosine + left * sine).to(first.dtype), mask=there)


@triton.jit
def attend_windows(
    qkv,
    cos,
    sin,
    ends,
    out,
    scaling,
    HEADS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
) -> None:
    """Rotate the queries and keys of one head of one window, and attend.

    All keys of a window are read at once, so that the softmax needs no loop; a query's dot product is the sum over the
    two halves of a head, which are the rotated pairs. Angles are read twice, and values before they are needed: so
    fewer registers are in use at a time, and more programs run on an SM.

    Shape: as in `rotate_patches`; ends int32 [windows + 1]; out [rows, HEADS * 2 * HALF]. ROWS is a power of two,
    at least the size of the longest window.
    """
    window, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(ends + window), tl.load(ends + window + 1)
    first_row = begin.to(tl.int64)
    row, place = tl.arange(0, ROWS), tl.arange(0, DIMS)
    real = row < end - begin
    there = real[:, None] & (place < HALF)[None, :]
    queries = qkv + first_row * 6 * HEADS * HALF + head * 2 * HALF
    keys = queries + 2 * HEADS * HALF
    values = keys + 2 * HEADS * HALF
    cell = row[:, None] * 6 * HEADS * HALF + place[None, :]
    angle = first_row * HALF + row[:, None] * HALF + place[None, :]
    kind = qkv.dtype.element_ty
    left = tl.load(keys + cell, mask=there, other=0.0).to(tl.float32)
    right = tl.load(keys + HALF + cell, mask=there, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle, mask=there, other=0.0)
    sine = tl.load(sin + angle, mask=there, other=0.0)
    key = (left * cosine - right * sine).to(kind)
    other_key = (right * cosine + left * sine).to(kind)
    left = tl.load(queries + cell, mask=there, other=0.0).to(tl.float32)
    right = tl.load(queries + HALF + cell, mask=there, other=0.0).to(tl.float32)
    # With another policy, or the compiler would keep the first ones in registers.
    cosine = tl.load(cos + angle, mask=there, other=0.0, eviction_policy="evict_last")
    sine = tl.load(sin + angle, mask=there, other=0.0, eviction_policy="evict_last")
    query = (left * cosine - right * sine).to(kind)
    other_query = (right * cosine + left * sine).to(kind)
    value = tl.load(values + cell, mask=there, other=0.0)
    other_value = tl.load(values + HALF + cell, mask=there, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    scores = tl.dot(other_query, tl.trans(other_key), scores, input_precision="ieee")
    scores = tl.where(real[None, :], scores * scaling, -float("inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    total = tl.sum(weights, axis=1)[:, None]
    rounded = weights.to(kind)
    made = out + first_row * 2 * HEADS * HALF + head * 2 * HALF
    target = row[:, None] * 2 * HEADS * HALF + place[None, :]
    summed = tl.dot(rounded, value, input_precision="ieee") / total
    tl.store(made + target, summed.to(kind), mask=there)
    summed = tl.dot(rounded, other_value, input_precision="ieee") / total
    tl.store(made + HALF + target, summed.to(kind), mask=there)
