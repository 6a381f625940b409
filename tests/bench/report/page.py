"""Generated parts of a page: only the text between two markers is replaced."""

from __future__ import annotations

import re
from pathlib import Path

from vsched.errors import ConfigError


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with the text between the markers of a name replaced.

    Raises:
        ConfigError: When the page does not contain exactly one pair of them.
    """
    begin, end = f"<!-- bench: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
    if page.count(begin) != 1 or page.count(end) != 1 or not pattern.search(page):
        raise ConfigError(
            f"the page lacks a unique part {name}. Remedy: write {begin} and {end} on separate lines, once"
        )
    return pattern.sub(lambda _: f"\n{text.strip()}\n\n", page)


def holding(folder: Path, name: str) -> Path:
    """Return the page of a folder that contains the markers of a name.

    Raises:
        ConfigError: When there is none, or several.
    """
    begin = f"<!-- bench: {name} -->"
    found = [path for path in sorted(folder.glob("*.md")) if begin in path.read_text()]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} pages of {folder} have a place for {name}. Remedy: write {begin} into one of them"
        )
    return found[0]


def write(path: Path, name: str, text: str) -> None:
    """Replace a part of a page on disk."""
    path.write_text(replaced(path.read_text(), name, text))
