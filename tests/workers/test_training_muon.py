"""Muon: the library's steps, stacked; what is fused learns as if it were not."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from demo_training.muon import Muon, orthogonalised  # noqa: E402

SHAPES = ((24, 16), (16, 24), (16, 24), (16, 16), (48, 16))


def drawn(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters() -> list[Any]:
    return [torch.nn.Parameter(value) for value in drawn(0)]


def test_muon_steps_as_the_library_does() -> None:
    ours, theirs = parameters(), parameters()
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    library = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)
    own = Muon(ours, **settings)
    for step in range(1, 4):
        for mine, other, gradient in zip(ours, theirs, drawn(step), strict=True):
            mine.grad, other.grad = gradient, gradient.clone()
        own.step()
        library.step()
    for mine, other, start in zip(ours, theirs, drawn(0), strict=True):
        moved = (other - start).norm()
        assert moved > 1
        assert (mine - other).norm() < 0.05 * moved, "the library rounds to bfloat16 on the way"


def test_muon_learns_fused_matrices_one_by_one() -> None:
    parts = [torch.nn.Parameter(value) for value in drawn(0)[1:3]]
    whole = torch.nn.Parameter(torch.cat([part.detach() for part in parts]))
    for part, gradient in zip(parts, drawn(1)[1:3], strict=True):
        part.grad = gradient
    whole.grad = torch.cat([part.grad for part in parts])
    apart, together = Muon(parts, lr=0.1), Muon([whole], lr=0.1, fused={whole: 2})
    apart.step()
    together.step()
    torch.testing.assert_close(whole, torch.cat(parts))


def test_muon_leaves_what_has_no_gradient() -> None:
    value = torch.nn.Parameter(drawn(0)[0])
    Muon([value], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(value, drawn(0)[0], rtol=0, atol=0)


def test_muon_brings_singular_values_near_one() -> None:
    seen = torch.linalg.svdvals(orthogonalised(torch.stack(drawn(2)[1:3])))
    assert 0.6 < seen.min() <= seen.max() < 1.3
