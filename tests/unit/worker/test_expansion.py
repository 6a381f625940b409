"""Expansion of placeholders, named arrays of an image, and worker plug-ins by name."""

from __future__ import annotations

import numpy as np
import pytest

from vsched.errors import ConfigError
from vsched.types import ArraySpec
from vsched.worker.contract import ImagePlan, extent_bytes, view_arrays
from vsched.worker.expansion import expand_images
from vsched.worker.registry import check_worker_name, load_worker

IMAGE, BREAK, END = 5, 6, 7


def test_expansion_of_rows_with_separators() -> None:
    """The spans of an image contain its placeholders only, not the separators around them."""
    rows = ImagePlan((), 6, (8, IMAGE, IMAGE, IMAGE, BREAK, IMAGE, IMAGE, IMAGE, END))
    plain = ImagePlan((), 2)
    ids, spans = expand_images([1, IMAGE, IMAGE, 2], [rows, plain], placeholder=IMAGE)
    assert ids == [1, *rows.expansion, IMAGE, IMAGE, 2]
    assert spans == [((2, 5), (6, 9)), ((10, 12),)]
    places = [at for runs in spans for start, stop in runs for at in range(start, stop)]
    assert [at for at, token in enumerate(ids) if token == IMAGE] == places


def test_arrays_lie_one_after_the_other_each_at_a_cache_line() -> None:
    specs = (
        ArraySpec("mask", "bool", (3, 5)),
        ArraySpec("tiles", "uint8", (3, 3, 8, 8)),
        ArraySpec("image_size", "int64", (2,)),
    )
    assert [spec.nbytes for spec in specs] == [15, 576, 16]
    assert extent_bytes(specs) == 64 + 576 + 16
    extent = np.zeros(extent_bytes(specs), np.uint8)
    views = view_arrays(specs, extent)
    begins = [view.__array_interface__["data"][0] - extent.ctypes.data for view in views.values()]
    assert begins == [0, 64, 640]
    found = [ArraySpec(name, view.dtype.name, view.shape) for name, view in views.items()]
    assert found == [*specs]
    views["image_size"][...] = (1, 2)
    assert extent[640:].view(np.int64).tolist() == [1, 2], "views, no copies"
    extent.flags.writeable = False
    assert not any(view.flags.writeable for view in view_arrays(specs, extent).values())
    with pytest.raises(ValueError, match="cannot reshape|size"):
        view_arrays(specs, extent[:-8])
    assert extent_bytes(()) == 0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("builtins:print", "x: worker plug-in 'builtins:print' is a builtin_function_or_method"),
        ("nope", "x: 'nope' is unknown. Known in vsched.workers: transformers"),
    ],
)
def test_load_worker_refuses_input_other_than_plugins(name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_worker(name, path="x")


def test_load_worker_without_torch_reports_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: str) -> object:
        raise ModuleNotFoundError(f"{target} needs torch")

    monkeypatch.setattr("vsched.plugins._import", fail)
    with pytest.raises(ConfigError, match=r"needs torch. Remedy: pip install 'vsched\[workers\]'"):
        load_worker("transformers")


def test_check_worker_name_imports_nothing() -> None:
    check_worker_name("transformers")
    check_worker_name("my_package.workers:plugin")
    with pytest.raises(ConfigError, match="'nope' is unknown"):
        check_worker_name("nope")
