"""Configuration keys of adapters."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.config.section import Section


class AdaptersConfig(Section, frozen=True, kw_only=True):
    """LoRA adapters: how many can be loaded, and from which folders; see docs/adapters.md."""

    count_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Maximum number of loaded adapters; 0 for none. Each rank allocates memory for all of them at "
            "start, each with rank `adapters.rank_max` on all layers.",
        ),
    ] = 0
    rank_max: Annotated[int, Meta(ge=1, le=4096, description="Maximum rank of an adapter.")] = 16
    encoder: Annotated[
        bool,
        Meta(
            description="Allow adapters that change the vision tower; encode ranks then allocate memory for them."
        ),
    ] = False
    load: Annotated[
        dict[str, str],
        Meta(
            description='Folders of the adapters to load at start, by name: `{sql = "/adapters/sql"}`.'
        ),
    ] = msgspec.field(default_factory=dict)
    directory: Annotated[
        str,
        Meta(
            description="Folder of the adapters that may be loaded while the server runs; empty for none."
        ),
    ] = ""
    load_s: Annotated[
        float, Meta(gt=0, description="Maximum time for all ranks to add an adapter.")
    ] = 60.0
