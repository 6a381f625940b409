"""Middleware of vLLM: `--middleware vsched.integrations.vllm.Middleware`."""

from __future__ import annotations

from typing import Any

import msgspec
import vllm

from vsched.integrations.middleware import MiddlewareSettings, PolicyMiddleware
from vsched.integrations.vllm.settings import FRONT, read_settings, statistics_path


class Middleware(PolicyMiddleware):
    """Reads the tables of vLLM's `--additional-config`, and the table `server` of a vsched configuration."""

    def read_settings(self, app: Any) -> MiddlewareSettings:
        config = app.state.vllm_config
        settings = read_settings(config, vllm.__version__, FRONT)
        server = settings.rest.get("server", {})
        return MiddlewareSettings(
            policies=settings.policies,
            passed_over_ns=int(settings.limits.passed_over_max_s * 1e9),
            budget_ms=settings.limits.call_budget_ms,
            slow_max=settings.limits.slow_calls_max,
            tenant_header=server.get("tenant_header", ""),
            tenant_keys_variable=server.get("tenant_keys_variable", ""),
            replicas=config.parallel_config.data_parallel_size,
            replica_header="x-data-parallel-rank",
        )

    def server_figures(self, app: Any) -> Any:
        try:
            return msgspec.json.decode(statistics_path(app.state.vllm_config).read_bytes())
        except OSError:
            return None
