"""The first command of the README, as a newcomer runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import PLAIN, run_command
from vsched import Engine
from vsched.cli import demo_command
from vsched.cli.demo_command import data_url, is_answer
from vsched.config import load_config
from vsched.errors import ConfigError
from vsched.media import MediaReference
from vsched.types import SamplingParams
from vsched.worker.contract import VideoSampling
from vsched_workers.plugin import TransformersPlugin

TRAINED = Path(__file__).parents[2] / "workers" / "demo-model"


@pytest.mark.slow
def test_demo_answers_right_and_encodes_each_picture_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the checkpoint of the repository every answer is right, and a turn encodes only its own picture."""
    monkeypatch.chdir(tmp_path)
    printed = run_command("demo", env=PLAIN)
    lines = printed.splitlines()
    assert "(right)" in next(line for line in lines if line.startswith("assistant"))
    turns = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    turns = [cells for cells in turns if len(cells) == 6 and cells[0].isdigit()]
    counted = [(int(number), int(images), int(encoded)) for number, _, images, encoded, *_ in turns]
    assert counted == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]
    assert [cells[-1] for cells in turns] == ["right"] * 3
    for name in ("picture", "turn-1", "turn-2", "turn-3"):
        assert (tmp_path / ".demo" / f"{name}.png").exists()
    for wanted in ("Serving at http://127.0.0.1:", "prefill", "generate rank 0", "Stopped"):
        assert wanted in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"^openai is not installed. Remedy: pip install 'vsched\[demo\]'$"),
        (["--folder", "taken"], r"^--folder taken: cannot be created: File exists. Remedy: "),
    ],
)
def test_demo_names_unmet_requirements(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    monkeypatch.setattr(demo_command, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=message):
        run_command("demo", *words)


def test_trained_checkpoint_is_found_and_small() -> None:
    """Files in the repository have at most 12 MB."""
    assert TransformersPlugin().trained_checkpoint() == str(TRAINED)
    assert sum(path.stat().st_size for path in TRAINED.iterdir()) <= 12_000_000


async def test_trained_checkpoint_reads_a_picture_shown_for_a_second() -> None:
    """A video of one frame group has the answer of an image, which the vision tower gets as two equal frames."""
    turns = [turn for (turn,) in TransformersPlugin().exam("number", 3, seed=4)]
    config = load_config(None, sets=[f"model.path={TRAINED}"], environ={}).config
    async with Engine(config) as engine:
        for turn in turns:
            url = data_url(turn.images[0])
            text = {"type": "text", "text": turn.question}
            prompt = [{"role": "user", "content": [{"type": "video"}, text]}]
            generation = await engine.generate(
                prompt=engine.preprocessor.render(prompt),
                images=[MediaReference((url, url), is_video=True, sampling=VideoSampling(fps=2.0))],
                sampling=SamplingParams(max_tokens=12, temperature=0.0),
                request_id=turn.answer,
            )
            answer = "".join([delta.text async for delta in generation])
            assert is_answer(answer, turn.answer)
