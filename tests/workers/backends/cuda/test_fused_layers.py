"""Fused layers of a GPU compared with transformers' modules, with kernels in Triton's interpreter or on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.parity.architectures import make_checkpoint
from tests.workers.backends.cpu.twins import run_both
from tests.workers.backends.cuda.on_host import DEVICE
from tests.workers.backends.cuda.races import check_not_used
from tests.workers.driver import Checkpoints, Question, Stage
from tests.workers.test_language import mixed_questions
from vsched_workers import language
from vsched_workers.backends.base import RunnableLanguage
from vsched_workers.backends.cuda import fused_layers
from vsched_workers.backends.cuda.attention_trials import usable_kernels
from vsched_workers.backends.cuda.fused_layers import FusedLayers, LayerKernels, fits, merge
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.families.decoders import Decoder

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]


def usable(dtype: torch.dtype = torch.float32, device: str = DEVICE) -> LayerKernels | None:
    return usable_kernels(LayerKernels, fused_layers.trial, dtype, device, what="fused layers")


class FusedOnHost(Backend):
    """The host with the fused layers of a GPU."""

    def prepare_language(
        self, model: Any, head: torch.Tensor, decoder: Decoder
    ) -> RunnableLanguage:
        kernels = usable(self.dtype, "cpu")
        assert kernels is not None
        assert fits(decoder, model.config)
        merge(model, decoder)
        plain = super().prepare_language(model, head, decoder)
        layers = FusedLayers(model, decoder, self.send, kernels)
        return RunnableLanguage(layers, plain.head, plain.weights_bytes)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="whole models run on the host; those on a GPU are in test_gpu.py"
)
@pytest.mark.parametrize("name", ["nano25", "nano3", "llama", "seed_oss"])
def test_fused_layers_equal_the_modules(
    name: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode rows, chunks and images, including deepstack and norms of heads; text models, one with biases."""
    if name.startswith("nano"):
        path, questions = checkpoints(name), mixed_questions()
    else:
        path, questions = tmp_path, [Question(range(3, 3 + n), count=8) for n in (5, 21)]
        make_checkpoint(name, path)
    exact = Stage.load(path)
    monkeypatch.setattr(
        language, "choose_backend", lambda settings, dtype, _: FusedOnHost(settings, dtype)
    )
    twins = run_both(exact, Stage.load(path), questions, chunk=9, arrivals=2, preempts=5)
    wanted, found = (torch.cat(each) for each in twins.logits)
    assert len(wanted) >= 16
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("broken", LayerKernels._fields)
def test_kernels_that_are_wrong_or_do_not_run_are_not_used(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check_not_used(usable, LayerKernels, broken, monkeypatch, caplog)
