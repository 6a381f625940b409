"""Import of torch without the parts that ranks with vsched's own modules do not use, which take a third of its time.

The parts are exporting, quantization-aware training, data loading, distributions, masked tensors, and Python
implementations of operators for tensors without data. Each is a stand-in that loads the part when an attribute is first
read, so nothing is lost, with one exception: `torch._meta_registrations` is imported for its registrations alone.
Models of transformers may need these when they are built without weights, and import torch as usual.

If a later version of torch cannot be imported like this, the fork server ends, and ranks start as new processes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

DEFERRED = frozenset(
    {
        "torch._meta_registrations",
        "torch._native",
        "torch.distributions",
        "torch.export",
        "torch.masked",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.quantization",
        "torch.utils.data",
    }
)


class _Deferred(ModuleType):
    """A module that is loaded when an attribute is first read."""

    def __getattr__(self, name: str) -> Any:
        spec: ModuleSpec | None = self.__dict__.pop("_deferred", None)
        if spec is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        assert spec.loader is not None
        self.__spec__, self.__loader__, self.__package__ = spec, spec.loader, spec.parent
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        spec.loader.exec_module(self)
        return getattr(self, name)


class _Deferring(Loader):
    """Creates a stand-in for the module of a specification."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_deferred"] = self._spec
        module.__file__ = self._spec.origin  # `inspect` reads it from all modules


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch._dynamo":  # the compiler, which expects these modules
            getattr(importlib.import_module("torch._meta_registrations"), "aten")  # noqa: B009
        if name == "torch.func":  # brings torch._logging, which in torch 2.15 must follow torch.fx
            importlib.import_module("torch.fx")
        spec = PathFinder.find_spec(name, path, target) if name in DEFERRED else None
        return None if spec is None else ModuleSpec(name, _Deferring(spec))


if "torch" not in sys.modules:
    sys.meta_path.insert(0, _Finder())
    import torch  # noqa: F401
