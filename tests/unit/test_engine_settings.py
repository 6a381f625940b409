"""The configuration's sections and the settings that they become must not drift apart."""

from __future__ import annotations

import msgspec

from vsched.assembly import media_settings
from vsched.config import Config
from vsched.media.settings import MediaSettings


def test_media_section_has_the_pipelines_keys_and_defaults() -> None:
    assert media_settings(Config()) == MediaSettings()
    assert [field.name for field in msgspec.structs.fields(type(Config().media))] == [
        field.name for field in msgspec.structs.fields(MediaSettings)
    ]
