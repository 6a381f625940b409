from __future__ import annotations

import pytest

from vsched.errors import ConfigError
from vsched.worker.registry import check_worker_name, load_worker


def test_load_worker_refuses_input_other_than_plugins() -> None:
    with pytest.raises(
        ConfigError,
        match="encode.plugin: worker plug-in 'builtins:print' is a builtin_function_or_method",
    ):
        load_worker("builtins:print", path="encode.plugin")
    with pytest.raises(
        ConfigError, match="x: 'nope' is unknown. Known in vsched.workers: transformers"
    ):
        load_worker("nope", path="x")


def test_load_worker_without_torch_reports_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.plugins._import", _raise_missing_torch)
    with pytest.raises(ConfigError, match=r"needs torch. Remedy: pip install 'vsched\[workers\]'"):
        load_worker("transformers")


def _raise_missing_torch(target: str) -> object:
    raise ModuleNotFoundError(f"{target} needs torch")


def test_check_worker_name_imports_nothing() -> None:
    check_worker_name("transformers")
    check_worker_name("my_package.workers:plugin")
    with pytest.raises(ConfigError, match="'nope' is unknown"):
        check_worker_name("nope")
