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
            description="Most adapters at a time; 0 for none. Each rank takes the memory for all of them when it "
            "starts, each of `adapters.rank_max` on all layers.",
        ),
    ] = 0
    rank_max: Annotated[int, Meta(ge=1, le=4096, description="Highest rank of an adapter.")] = 16
    encoder: Annotated[
        bool,
        Meta(
            description="Whether adapters may change the vision tower, too; encode ranks take memory for that then."
        ),
    ] = False
    load: Annotated[
        dict[str, str],
        Meta(
            description='Folders of the adapters that are loaded at start, by name: `{sql = "/adapters/sql"}`.'
        ),
    ] = msgspec.field(default_factory=dict)
    directory: Annotated[
        str,
        Meta(
            description="Folder below which those lie that may be loaded while the server runs; empty for none."
        ),
    ] = ""
    load_s: Annotated[
        float, Meta(gt=0, description="Longest time for all ranks to add an adapter.")
    ] = 60.0
