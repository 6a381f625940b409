"""The pure parts of what runs vLLM's tests against vsched: reports, reasons and tables."""

from __future__ import annotations

import pytest

from tests.vllm_suite import reasons, shim, table

REPORT = """<testsuites><testsuite>
<testcase name="test_good"/>
<testcase name="test_bad"><failure message="AssertionError: 400 | is&#10;not 200">text</failure></testcase>
<testcase name="test_broken"><error message="failed on setup">RuntimeError: did not start</error></testcase>
<testcase name="test_far"><error message="failed">OSError: couldn't connect to 'https://hub'</error></testcase>
<testcase name="test_ours"><skipped message="not applicable: audio"/></testcase>
<testcase name="test_theirs"><skipped message=""/></testcase>
</testsuite></testsuites>"""


def test_read_tells_what_became_of_each_test() -> None:
    """Failures and errors have their first line; what needs a download or was skipped has its reason."""
    assert [(o.test, o.kind, o.why) for o in table.read(REPORT)] == [
        ("test_good", "passed", ""),
        ("test_bad", "failed", "AssertionError: 400 | is"),
        ("test_broken", "failed", "failed on setup"),
        ("test_far", "not applicable", "a download"),
        ("test_ours", "not applicable", "audio"),
        ("test_theirs", "not applicable", "skipped by vLLM"),
    ]


def test_write_counts_by_file_and_reason_and_names_what_failed() -> None:
    """A file of which nothing applies is in the total alone; bars in errors do not break the table."""
    skipped = [table.Outcome("all", "not applicable", "audio")]
    lines = table.write({"a.py": table.read(REPORT), "b.py": skipped}).splitlines()
    assert "| a.py | 1 | 3 | 2 |" in lines
    assert "| all 2 files | 1 | 4 | 2 |" in lines
    assert "| audio | 2 |" in lines
    assert "| a.py: test_bad | AssertionError: 400 \\| is |" in lines
    assert not any(line.startswith("| b.py") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--enable-lora"], "LoRA adapters"),
        (["--load-format=tensorizer"], "a loader of vLLM's"),
        (["--max-model-len", "8192", "--enforce-eager"], None),
    ],
)
def test_servers_with_what_vsched_lacks_are_not_started(
    arguments: list[str], reason: str | None
) -> None:
    """A flag counts in both forms; flags that are vLLM's own affair are ignored."""
    assert reasons.by_flags(arguments) == reason


def test_files_without_a_server_test_vllm_itself() -> None:
    """A server of the file, or the client of its folder's fixtures, makes a file applicable."""
    assert reasons.starts_server("with RemoteOpenAIServer(m, a) as s:", "")
    assert reasons.starts_server("async def test_a(client: X): ...", "RemoteOpenAIServer")
    assert not reasons.starts_server("def test_a(): client = Mock()", "RemoteOpenAIServer")
    assert not reasons.starts_server("async def test_a(client): ...", "")


def test_arguments_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context goes no further than the checkpoint's, and -1 log-probabilities are the whole vocabulary."""
    monkeypatch.setattr(shim, "SETTINGS", {"context": 2048, "vocabulary": 99})
    words = shim.settings(
        "some/model", ["--max-model-len=8192", "--max-num-seqs", "4", "--max-logprobs", "-1"]
    )
    assert set(words[1::2]) == {
        "model.name=some/model",
        "generate.context_tokens=2048",
        "generate.slots=4",
        "server.logprobs_max=99",
    }
