"""Checks of README.md and docs/: links, names of files and settings, commands, and examples that run.

A `python` block after `<!-- runnable: NAME.py -->` is written to a file of that name and imported, and its functions
named `test_*` are called; if it imports pytest, pytest runs it. All blocks of a page are in one folder. Every `toml`
block must load as a configuration in that folder. Commands are checked in `sh` blocks, after a `$` in `text` blocks,
and in inline code that starts with `vsched` or `make`.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import pytest
import typer

from tests.patience import PATIENCE_S
from tests.unit.sim.shapes import COST, arrival
from vsched.cli import app
from vsched.cli.main import import_commands
from vsched.cli.vllm_flags import ServeCommand, translate
from vsched.config import Config, load_config
from vsched.policy import DECISIONS
from vsched.probes import PROBES
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.requests import Text, workload_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SITE = ROOT / "mkdocs.yml"
FENCE = re.compile(
    r"^(?:<!-- runnable: (?P<name>\S+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
MACHINE_PATH = re.compile(r"(?<![\w./*])/(?:work|tmp|home|root|Users|opt|mnt|var)/")
SOURCE = re.compile(r"(?:vsched|policies|workers|tests|docs)/[\w/.]*")
SETTING = re.compile(r"(?P<path>[a-z]+(?:\.[a-z_]+)+)(?: ?=.*)?")
ENVIRONMENT = re.compile(r"^[A-Z_]+=\S*$")


class Block(NamedTuple):
    """A fenced block; `name` is the file name of a runnable one."""

    language: str
    text: str
    name: str | None


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def check_pages(failures: Callable[[Path], Iterator[str]], pages: list[Path] = PAGES) -> None:
    """Assert that a check finds no failures, and report those of all pages at once."""
    found = [f"{shown(page)}: {failure}" for page in pages for failure in failures(page)]
    assert not found, "\n".join(found)


@cache
def blocks(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text())
    return [Block(each["language"], each["text"], each["name"]) for each in found]


@cache
def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


@cache
def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


def dead_links(page: Path) -> Iterator[str]:
    for match in LINK.finditer(prose(page)):
        target, _, heading = match["target"].partition("#")
        if target.startswith(("http:", "https:")):
            continue
        found = (page.parent / target).resolve() if target else page
        if not found.exists():
            yield f"{match[0]}: no such file"
        elif not found.is_relative_to(ROOT):
            yield f"{match[0]}: outside of the repository"
        elif heading and heading not in headings(found):
            yield f"{match[0]}: no such heading"


def pages_without_a_line(index: Path) -> Iterator[str]:
    linked = {match["target"] for match in LINK.finditer(index.read_text())}
    pages = {path.name for path in PAGES if path.parent == index.parent and path != index}
    yield from sorted(pages - linked)


def test_docs_indexes_name_every_page() -> None:
    folders = [ROOT / name for name in ("docs", "docs/decisions", "docs/reference")]
    indexes = [one for one in PAGES if one.parent in folders and one.stem in {"index", "README"}]
    assert sorted(page.parent for page in indexes) == folders
    check_pages(pages_without_a_line, indexes)


def test_docs_site_has_a_place_for_every_page() -> None:
    """Decision records are reached through their index."""
    named = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", SITE.read_text(), re.MULTILINE)
    pages = [str(one.relative_to(ROOT / "docs")) for one in PAGES if ROOT / "docs" in one.parents]
    records = [page for page in pages if page.startswith("decisions/0")]
    assert sorted(named) == sorted(set(pages) - set(records)), (
        "put each page into the nav of mkdocs.yml, once"
    )


def test_docs_records_of_decisions_have_numbers_of_their_own_and_are_listed_in_order() -> None:
    folder = ROOT / "docs/decisions"
    named = sorted(page.name for page in folder.glob("0*.md"))
    numbers = [name[:4] for name in named]
    assert len(set(numbers)) == len(numbers), "two records have the same number"
    listed = re.findall(r"(?m)^\| \[(\d{4})\]\(\1-\S+\.md\) \|", (folder / "README.md").read_text())
    assert listed == numbers, "list each record once, by its number"
    titles = [(folder / name).read_text().partition("\n")[0] for name in named]
    wrong = [
        title for title, number in zip(titles, numbers, strict=True) if f"# {number}: " not in title
    ]
    assert not wrong, "the title of a record begins with its number"


def unknown_objects(page: Path) -> Iterator[str]:
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            yield name


def machine_paths(page: Path) -> Iterator[str]:
    yield from MACHINE_PATH.findall(page.read_text())


def missing_sources(page: Path) -> Iterator[str]:
    named = [code for code in CODE.findall(prose(page)) if SOURCE.fullmatch(code)]
    yield from (path for path in named if not (ROOT / path).exists())


def unknown_settings(page: Path) -> Iterator[str]:
    """Yield keys of sections of the configuration that do not exist: tables of policies have keys of their own."""
    codes = [code for code in CODE.findall(prose(page)) if ".safetensors" not in code]
    found = {match["path"] for code in codes if (match := SETTING.fullmatch(code)) is not None}
    named = found - PROBES.keys()
    yield from (path for path in sorted(named) if not is_setting(Config, path.split(".")))


def is_setting(section: type, names: list[str]) -> bool:
    """Return True for a key or a section, and for paths outside the sections of the configuration."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(section)}
    if names[0] not in kinds:
        return section is Config
    kind = kinds[names[0]]
    is_section = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return not names[1:] or not is_section or is_setting(kind, names[1:])


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the command lines of a page as words, without environment and comments."""
    for block in blocks(page):
        text = block.text.replace("\\\n", " ")
        lines = re.findall(r"^\$ (.+)$", text, re.MULTILINE)
        if block.language == "sh":
            lines = text.splitlines()
        for line in lines:
            words = shlex.split(line, comments=True)
            while words and ENVIRONMENT.match(words[0]):
                words.pop(0)
            if words:
                yield words
    for code in CODE.findall(prose(page)):
        if code.startswith(("vsched ", "make ")):
            yield shlex.split(code)


@cache
def command_line() -> Any:
    import_commands()
    return typer.main.get_command(app)


def unknown_words(words: list[str]) -> Iterator[str]:
    """Yield the inner and options of a `vsched` command line that do not exist."""
    command = command_line()
    rest = [word for word in words if word != "--help"]
    while rest and not rest[0].startswith("-") and (inner := getattr(command, "commands", None)):
        name = rest.pop(0)
        if name not in inner:
            yield f"{name!r} is no command of {command.name}"
            return
        command = inner[name]
    if isinstance(command, ServeCommand):
        rest = translate(rest).words
    known = {option for parameter in command.params for option in parameter.opts}
    options = [word.partition("=")[0] for word in rest if word.startswith("-")]
    yield from (f"{words}: no option {option}" for option in options if option not in known)


def unknown_commands(page: Path) -> Iterator[str]:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        match words:
            case [("vsched" | ".venv/bin/vsched"), *rest]:
                yield from unknown_words(rest)
            case ["make", *rest]:
                missing = {word for word in rest if "=" not in word} - targets
                yield from (f"make {target}: no such target" for target in sorted(missing))


def test_docs_reference_lists_every_command() -> None:
    names = {name for name, one in command_line().commands.items() if not one.hidden}
    page = (ROOT / "docs/reference/cli.md").read_text()
    assert set(re.findall(r"^\| `vsched ([\w-]+)` \|", page, re.MULTILINE)) == names


def test_docs_reference_lists_every_decision_of_a_policy() -> None:
    """With its class, its method and its tables."""
    page = (ROOT / "docs/reference/policy.md").read_text()
    row = re.compile(r"^\| (?:`(\w+)` )?\| (\w+): `(\w+)` \| ([^|]+) \|", re.MULTILINE)
    listed, base = {}, ""
    for named, decision, method, tables in row.findall(page):
        base = named or base
        listed[decision] = base, method, tuple(re.findall(r"`([\w.]+)`", tables))
    made = {name: (one.base.__name__, one.method, one.tables) for name, one in DECISIONS.items()}
    assert listed == made


def test_docs_error_codes_exist() -> None:
    """Codes in the table of the HTTP API occur in the source."""
    table = (ROOT / "docs/http-api.md").read_text().partition("## Errors")[2]
    rows = "".join(re.findall(r"^\| \d.*$", table, re.MULTILINE))
    codes = set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", rows))
    source = "".join(path.read_text() for path in (ROOT / "vsched").rglob("*.py"))
    assert len(codes) > 20
    assert not {code for code in codes if f'"{code}"' not in source}


@pytest.fixture
def page(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Return a page; its runnable files are in `tmp_path`, which can be imported from."""
    page = cast("Path", request.param)
    runnable = {block.name: block.text for block in blocks(page) if block.name is not None}
    for name, text in runnable.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield page
    for name in runnable:
        sys.modules.pop(name.removesuffix(".py"), None)


def pages_with(language: str, *, runnable: bool = False, slow: Sequence[str] = ()) -> list[Any]:
    return [
        pytest.param(
            page, id=shown(page), marks=[pytest.mark.thorough] if page.name in slow else []
        )
        for page in PAGES
        if any(one.language == language and (one.name or not runnable) for one in blocks(page))
    ]


def run_by_pytest(file: Path) -> None:
    """Run a file of tests that use fixtures."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file.name],
        cwd=file.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout


LONG = ("first-policy.md", "testing-with-faults.md")
"""Pages whose examples check a policy, or run pytest, in many random schedules."""


@pytest.mark.parametrize("page", pages_with("python", runnable=True, slow=LONG), indirect=True)
def test_docs_runnable_examples_run(page: Path, tmp_path: Path) -> None:
    for file in sorted(tmp_path.glob("*.py")):
        if "import pytest\n" in file.read_text():
            run_by_pytest(file)
            continue
        module = importlib.import_module(file.stem)
        tests = [value for name, value in vars(module).items() if name.startswith("test_")]
        assert bool(tests) == file.stem.startswith("test_")
        for test in tests:
            test()


def syntax_errors(page: Path) -> Iterator[str]:
    for block in blocks(page):
        if block.language == "python":
            try:
                ast.parse(block.text)
            except SyntaxError as error:
                yield f"{error}: {error.text}"


REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))


@pytest.mark.parametrize(
    ("failures", "pages"),
    [
        (dead_links, [*PAGES, ROOT / "CHANGELOG.md"]),
        (unknown_objects, REFERENCE),
        (machine_paths, PAGES),
        (missing_sources, PAGES),
        (unknown_settings, PAGES),
        (unknown_commands, PAGES),
        (syntax_errors, PAGES),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_docs_name_existing_things(
    failures: Callable[[Path], Iterator[str]], pages: list[Path]
) -> None:
    check_pages(failures, pages)


@pytest.mark.parametrize("page", pages_with("toml", slow=("swapping.md",)), indirect=True)
def test_docs_configurations_load_and_serve(page: Path, tmp_path: Path) -> None:
    """Configurations may use policies from the examples of their page, and no policy fails."""
    for number, block in enumerate(block for block in blocks(page) if block.language == "toml"):
        config = tmp_path / f"{number}.toml"
        config.write_text(block.text)
        loaded = load_config(config, environ={})
        requests = workload_of("two", [arrival(n, n, Text(n, 30 * n + 3)) for n in range(2)])
        outcome = simulate(loaded, requests, cost=COST, oracles=True)
        assert outcome.figures.finished == 2
        assert not outcome.policy_failure_counts
