"""The command line's configuration, host and policy commands."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import typer

from tests.commands import run_command as run
from tests.programs import printed_by
from vsched.aio.hosts.link import read_key_file
from vsched.cli import app
from vsched.cli.main import COMMANDS, import_commands, main
from vsched.config import keys_table, load_config
from vsched.errors import ConfigError, VschedError

ROOT = Path(__file__).parents[2]


def test_cli_config_check_looks_at_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config check` reports the same errors as the start of `vsched serve`."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    there = ["config", "check", "--set", f"model.path={ROOT / 'workers/demo-model'}", "--set"]
    assert run(*there, "generate.slots=8") == "The configuration is valid.\n"
    for assignment, text in {
        f"model.path={tmp_path / 'nowhere'}": "checkpoint 'nowhere' does not exist. Remedy: ",
        "model.path=org/nowhere": "'org/nowhere' is not a folder, HF_HUB_OFFLINE is set",
        "model.chat_template=nowhere.jinja": "'nowhere.jinja' is no file, and no template",
        "generate.tensor_parallel=7": "generate.tensor_parallel",
        "media.directory=/nowhere": "media.directory: not a folder: value '/nowhere'",
        "generate.context_tokens=1000000000": "generate.context_tokens: more than the checkpoint",
        'generate.drafting={use = "draft-model"}': "generate.drafting: the policy drafts with a m",
    }.items():
        with pytest.raises(VschedError, match=text):
            run(*there, assignment)


def test_cli_config_show_prints_toml_that_is_valid_and_loads(tmp_path: Path) -> None:
    path = tmp_path / "vsched.toml"
    path.write_text(run("config", "show", "--set", "generate.slots=2"))
    assert run("config", "check", "--config", str(path)) == "The configuration is valid.\n"
    assert load_config(path, environ={}).config.generate.slots == 2


def test_cli_config_show_reports_origins() -> None:
    environ = {"VSCHED__MODEL__NAME": "x"}
    output = run("config", "show", "--origin", "--set", "generate.slots=2", env=environ)
    assert "slots = 2  # command line\n" in output
    assert 'name = "x"  # environment VSCHED__MODEL__NAME\n' in output
    assert "block_size = 16  # default\n" in output


def test_cli_config_keys_prints_the_documented_table() -> None:
    assert run("config", "keys") == keys_table()


def test_cli_host_makes_a_key_that_engine_and_hosts_can_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts.key"
    assert "has a new key" in run("host", "--make-key", str(path))
    assert read_key_file(str(path), key="cluster.key_file")
    for words, message in (
        ([], "--listen and --key-file are needed"),
        (["--listen", "tcp://127.0.0.2:*"], "--listen and --key-file are needed"),
        (["--listen", "tcp://192.0.2.1:1", "--key-file", str(path)], r"cannot listen on tcp://192"),
    ):
        with pytest.raises(ConfigError, match=message):
            run("host", *words)


def test_cli_policies_lists_names_fields_and_defaults() -> None:
    output = run("policies")
    for expected in (
        "token-budget",
        "ageing_s = 10.0",
        "mem_fraction = 0.95",
        "youngest",
        "the next prefill chunk reads",
    ):
        assert expected in output


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tenant-fair", ("policy: tenant-fair", "output_weight = 2", "policies try tenant-fair")),
        (
            "tests.unit.test_plugins:Counting",
            (
                "Counts arrivals in one method",
                "admission: admit(), configured in encode.admission or generate.admission",
                "arrival: arrive(), configured in arrival",
                "all with one state",
                "State: Counts",
                "most = 8  (int, 1 or more)",
            ),
        ),
    ],
)
def test_cli_policies_show_describes_names_and_classes(
    name: str, expected: tuple[str, ...]
) -> None:
    output = run("policies", "show", name)
    assert [one for one in expected if one not in output] == []


def test_cli_refusal_is_a_line_for_each_problem_and_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", "generate.slots=-1", "--set", "server.prt=1"]
    monkeypatch.setattr(sys, "argv", ["vsched", "config", "check", *sets])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first.startswith("error: server.prt (from command line): unknown key.")
    assert second.startswith("error: generate.slots (from command line) is not valid: value -1")


def test_cli_knows_all_commands_by_name() -> None:
    """Only the module of a command is imported, and adds the command of that name."""
    import_commands()
    command: Any = typer.main.get_command(app)
    assert sorted(command.commands) == sorted(COMMANDS)
    for name, found in command.commands.items():
        functions = getattr(found, "commands", {name: found}).values()
        assert all(_defined_near(each.callback, COMMANDS[name]) for each in functions), name


def _defined_near(function: Any, module: str) -> bool:
    """Return True if a command is defined in a module, or in one that the module takes commands from."""
    found = inspect.unwrap(function)
    return found.__module__ == module or found in vars(importlib.import_module(module)).values()


def test_cli_imports_the_named_command_alone_and_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from vsched.cli.main import import_commands\n"
        "import_commands(['--version', 'serve', 'bench'])\n"
        "print('vsched.cli.serve_command' in sys.modules, 'vsched.cli.bench' in sys.modules)\n"
        "import_commands()\n"
        "heavy = ('torch', 'transformers', 'numba', 'uvicorn', 'openai', 'matplotlib')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert printed_by(code) == "True False\n[]\n"
