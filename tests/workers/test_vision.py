"""The encode worker compared with the vision tower of transformers' whole model."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.workers.driver import ROWS_A_PAGE, Stage, drawn_image, values_of
from tests.workers.reference import Reference
from vsched.types import ModelInfo
from vsched.worker.contract import EncodeJob, WorkerSettings
from vsched_workers import vision
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.families.qwen_image import PIXELS, grid_of
from vsched_workers.plugin import plugin

Stages = Callable[..., Stage]

IMAGES = [drawn_image(1, 90, 60), drawn_image(2, 200, 70), drawn_image(3, 33, 33)]


def jobs_of(stage: Stage) -> list[EncodeJob]:
    """Return one job per image, each with its own pages in descending order."""
    jobs: list[EncodeJob] = []
    page = 100
    for image in IMAGES:
        plan = stage.preprocessor.plan_image(*image.size)
        count = -(-plan.tokens // ROWS_A_PAGE)
        pages = list(range(page, page - count, -1))
        page -= count
        arrays = stage.preprocessor.process_image(image)
        jobs.append(EncodeJob(b"", plan.tokens, arrays, plan.metadata, pages))
    return jobs


def empty_pages(info: ModelInfo) -> npt.NDArray[np.uint8]:
    return np.full((101, ROWS_A_PAGE, info.embedding_row_bytes), 0xA5, dtype=np.uint8)


def rows_of(
    stage: Stage, job: EncodeJob, embeddings: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float32]:
    rows = embeddings[list(job.pages)].reshape(-1, stage.info.embedding_row_bytes)[: job.tokens]
    levels = stage.info.embedding_levels
    return rows.view(np.float32).reshape(job.tokens, levels, stage.info.hidden_size)


def test_encode_equals_the_whole_model(
    stages: Stages, references: Callable[[str], Reference], size: str
) -> None:
    """Rows and every deepstack level, several images in one call."""
    stage = stages(size)
    jobs = jobs_of(stage)
    embeddings = empty_pages(stage.info)
    stage.encoder.encode(jobs, embeddings)
    model = references(size).model.model
    with torch.inference_mode():
        out = model.get_image_features(
            values_of([job.arrays for job in jobs]),
            torch.tensor([grid_of(job.metadata) for job in jobs]),
            return_dict=True,
        )
    for index, job in enumerate(jobs):
        rows = rows_of(stage, job, embeddings)
        wanted = [
            out.pooler_output[index],
            *(x[index] for x in getattr(out, "deepstack_features", ())),
        ]
        assert rows.shape[1] == len(wanted)
        for level, tensor in enumerate(wanted):
            np.testing.assert_allclose(rows[:, level], tensor.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens_max", [0, 1, 16])
def test_encode_gives_the_same_in_parts(
    stages: Stages, checkpoints: Callable[[str], Path], tokens_max: int
) -> None:
    """A token limit splits a batch; an image's rows do not depend on the other images."""
    stage = stages("nano3")
    settings = WorkerSettings(encode_tokens_max=tokens_max)
    worker = plugin.load_encoder(stage.info, settings, lambda _label, _fraction: None)
    jobs = jobs_of(stage)
    found, alone = empty_pages(stage.info), empty_pages(stage.info)
    worker.encode(jobs, found)
    for job in jobs:
        worker.encode([job], alone)
    for job in jobs:
        np.testing.assert_allclose(
            rows_of(stage, job, found), rows_of(stage, job, alone), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("attention", ["auto", "exact"])
@pytest.mark.parametrize("layers", [1, 2, 0])
def test_encode_pauses_between_blocks(
    stages: Stages, size: str, attention: str, layers: int
) -> None:
    """Bit-identical rows, written at the end; between slices the thread is not in inference mode."""
    stage = stages(size)
    settings = WorkerSettings(attention=attention)
    worker = plugin.load_encoder(stage.info, settings, lambda _label, _fraction: None)
    assert worker.pauses
    jobs = jobs_of(stage)
    whole, found = empty_pages(stage.info), empty_pages(stage.info)
    worker.encode(jobs, whole)
    worker.begin(jobs, found)
    pauses = 0
    while not worker.advance(layers):
        pauses += 1
        assert not torch.is_inference_mode_enabled()
        assert (found == 0xA5).all()
        assert torch.ones(1, requires_grad=True).requires_grad, "what runs meanwhile is free"
    assert np.array_equal(found, whole)
    blocks = len(worker._tower.layers)  # type: ignore[attr-defined]
    assert pauses == ((blocks - 1) // layers if layers else 0)


class BehindBackend(Backend):
    """A device that runs behind the host, so that an encoder does not pause between layers."""

    synchronous = False


def test_encode_without_pauses_needs_no_greenlets(
    checkpoints: Callable[[str], Path], stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With GPUs, greenlet may not be installed: the module that needs it is not even imported."""
    jobs, expected = jobs_of(stages("nano25")), empty_pages(stages("nano25").info)
    stages("nano25").encoder.encode(jobs, expected)
    monkeypatch.setattr(vision, "choose_backend", BehindBackend)
    monkeypatch.setitem(sys.modules, "vsched_workers.batching.sliced_run", None)
    stage = Stage.load(str(checkpoints("nano25")), attention="exact", dtype="float32")
    assert not stage.encoder.pauses
    found = empty_pages(stage.info)
    stage.encoder.encode(jobs, found)
    assert np.array_equal(found, expected)


def test_encode_that_fails_within_a_batch_takes_the_next(stages: Stages) -> None:
    """The error is raised by the failing layer; an abandoned batch leaves nothing behind."""
    stage = stages("nano25")
    worker = plugin.load_encoder(stage.info, WorkerSettings(), lambda _label, _fraction: None)
    assert worker.pauses
    jobs = jobs_of(stage)
    wrong = replace(jobs[0], tokens=jobs[0].tokens - 1)
    worker.begin([wrong], empty_pages(stage.info))
    assert not worker.advance(1)
    with pytest.raises(ValueError, match="the encoder yields rows of shape"):
        worker.advance(0)
    left = empty_pages(stage.info)
    gone = weakref.ref(left)
    worker.begin(jobs[1:], left)
    del left
    assert not worker.advance(1)
    found, whole = empty_pages(stage.info), empty_pages(stage.info)
    worker.begin(jobs[:1], found)
    gc.collect()
    assert gone() is None, "what was left of the other batch is given back"
    assert worker.advance(0)
    worker.encode(jobs[:1], whole)
    assert np.array_equal(found, whole)
    assert not torch.is_inference_mode_enabled()


def test_encode_writes_nothing_beyond_its_rows(stages: Stages) -> None:
    """The last page of an item is partly filled; the rest of it is not written."""
    stage = stages("nano25")
    job = next(job for job in jobs_of(stage) if job.tokens % ROWS_A_PAGE)
    embeddings = empty_pages(stage.info)
    stage.encoder.encode([job], embeddings)
    assert (embeddings[job.pages[-1], job.tokens % ROWS_A_PAGE :] == 0xA5).all()
    untouched = np.setdiff1d(np.arange(len(embeddings)), list(job.pages))
    assert (embeddings[untouched] == 0xA5).all()


def test_encode_refuses_a_job_whose_tokens_do_not_fit_its_grid(stages: Stages) -> None:
    """A length mismatch is an error; rows are never trimmed."""
    stage = stages("nano25")
    job = jobs_of(stage)[0]
    wrong = replace(job, tokens=job.tokens - 1)
    with pytest.raises(ValueError, match=f"expected \\({job.tokens - 1}, "):
        stage.encoder.encode([wrong], empty_pages(stage.info))


def test_encoded_rows_own_their_storage(stages: Stages) -> None:
    """No entry is a view of its batch: a page keeps its rows when pixels and other pages change."""
    stage = stages("nano25")
    jobs = jobs_of(stage)
    embeddings = empty_pages(stage.info)
    stage.encoder.encode(jobs, embeddings)
    first = rows_of(stage, jobs[0], embeddings).copy()
    for job in jobs:
        job.arrays[PIXELS][:] = 0
    for job in jobs[1:]:
        embeddings[list(job.pages)] = 0
    stage.encoder.encode(jobs[1:], embeddings)
    assert np.array_equal(rows_of(stage, jobs[0], embeddings), first)
    assert np.any(first)


def test_encode_writes_the_rows_of_a_job_and_nothing_else(stages: Stages) -> None:
    """An entry contains only its own rows, in its own pages."""
    stage = stages("nano25")
    jobs = jobs_of(stage)
    together = empty_pages(stage.info)
    stage.encoder.encode(jobs, together)
    untouched = empty_pages(stage.info)
    written = np.zeros(together.shape[:2], dtype=bool)
    for job in jobs:
        alone = empty_pages(stage.info)
        stage.encoder.encode([job], alone)
        np.testing.assert_allclose(
            rows_of(stage, job, together), rows_of(stage, job, alone), atol=1e-4
        )
        written |= (alone != untouched).any(axis=-1)
    assert written.sum() == sum(job.tokens for job in jobs)
    assert np.array_equal((together != untouched).any(axis=-1), written)
