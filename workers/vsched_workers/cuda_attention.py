"""Decode attention on CUDA over the paged cache.

Not yet run on a GPU: the Triton kernel was checked in Triton's interpreter on the CPU, the call of torch's own kernel
against its documentation only.

`TritonDecode` is what `auto` takes. `VarlenDecode` uses the kernel that comes with torch from 2.13 on; the flash
attention beneath it may ask for blocks of 256 tokens, which is why it has to be named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vsched_workers.attention import PagedStep


def _on_device(step: PagedStep, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block tables and contexts on the device; copied once a step."""
    found = step.scratch.get("cuda")
    if found is None:
        found = (
            torch.from_numpy(step.tables).to(device),
            torch.from_numpy(step.contexts).to(device),
        )
        step.scratch["cuda"] = found
    tables, contexts = found
    return tables, contexts


class VarlenDecode:
    """The kernel of torch, reading through the block table."""

    def __init__(self) -> None:
        import inspect

        from torch.nn.attention import varlen

        if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
            raise ImportError("this torch's varlen_attn reads no block table")
        self._attend: Any = varlen.varlen_attn

    def __call__(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head dim] for a query of the same shape."""
        tables, contexts = _on_device(step, query.device)
        keys, values = step.cache.keys[layer], step.cache.values[layer]
        rows = len(query)
        paged = (-1, step.cache.block_size, *keys.shape[1:])
        out: torch.Tensor = self._attend(
            query,
            keys.view(paged),
            values.view(paged),
            torch.arange(rows + 1, dtype=torch.int32, device=query.device),
            None,
            1,
            int(step.contexts.max()),
            scale=scaling,
            enable_gqa=True,
            seqused_k=contexts,
            block_table=tables,
        )
        return out


class TritonDecode:
    """Our kernel: one program for each row and key head, with a running softmax."""

    def __init__(self) -> None:
        from vsched_workers.triton_kernels import decode_rows

        self._kernel: Any = decode_rows

    def __call__(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head dim] for a query of the same shape."""
        tables, contexts = _on_device(step, query.device)
        keys, values = step.cache.keys[layer], step.cache.values[layer]
        query = query.contiguous()
        rows, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        out = torch.empty_like(query)
        self._kernel[(rows, kv_heads)](
            query,
            keys,
            values,
            tables,
            contexts,
            out,
            scaling,
            tables.stride(0),
            kv_heads,
            group,
            head_dim,
            BLOCK_SIZE=step.cache.block_size,
            # The matrix units want at least 16 rows.
            GROUP=max(16, _power_of_two(group)),
            HEAD_DIM=max(16, _power_of_two(head_dim)),
            TOKENS=64,
        )
        return out


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
