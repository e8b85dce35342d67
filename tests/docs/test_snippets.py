"""Tests that every shell and Python snippet of README.md and docs/ runs as shown, or states why it does not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clips import encode, frames_of
from tests.docs.snippets import RUN, blocks_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "content").rglob("*.md"))]
#: Pages that train, which takes minutes.
LONG = ("tutorials/lora.md", "tutorials/several-gpus.md", "tutorials/s3.md", "guides/features.md", "guides/trainer.md")
#: name → (width, height, number of frames)
CLIPS = {"bikes": (432, 256, 60), "carphone_pristine": (272, 368, 40), "bigbuckbunny": (288, 256, 50)}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a reader is assumed to have: videos/ with captions in metadata.csv, and the dataset made of it."""
    folder = tmp_path_factory.mktemp("start")
    videos = folder / "videos"
    videos.mkdir()
    rows = ["video,caption,aesthetic"]
    for number in range(8):
        name, (width, height, num_frames) = list(CLIPS.items())[number % 3]
        (videos / f"{number}.mp4").write_bytes(encode(frames_of(name, width, height, num_frames)))
        rows.append(f"{number}.mp4,{name} number {number},{4 + number / 4}")
    (videos / "metadata.csv").write_text("\n".join(rows) + "\n")
    command = [sys.executable, "-m", "streamvid", "shard", "videos", "dataset"]
    options = ["--resolution", "256px", "--num-frames", "1,17,33", "--val-fraction", "0.2"]
    subprocess.run([*command, *options], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if str(page).endswith(LONG) else ()) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_snippets_of_a_page_run(page: Path, start: Path, tmp_path: Path) -> None:
    if not any(True for _ in blocks_of(page.read_text())):
        return
    folder = tmp_path / "reader"
    shutil.copytree(start, folder)
    done = run_page(page, folder)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    for block in told:
        print(f"{page.name}:{block['line']} {block['language']}: {block['outcome']} {block['text']}")
    failed = [
        f"{page}:{block['line']}\n{block['code']}\n{block['text']}" for block in told if block["outcome"] == "failed"
    ]
    assert done.returncode == 0 and not failed, "\n".join(failed) or done.stderr


def test_a_broken_snippet_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for code in ("```bash\nfalse\n```", "```python\nimport streamvid\nstreamvid.nothing\n```"):
        page.write_text(code)
        assert run_page(page, tmp_path).returncode == 1
    page.write_text(
        "<!-- not run: needs a GPU -->\n```bash\nfalse\n```\n<!-- fails: oh -->\n```bash\necho oh; false\n```"
    )
    assert run_page(page, tmp_path).returncode == 0


def test_a_page_says_why_a_snippet_does_not_run() -> None:
    for page in PAGES:
        for block in blocks_of(page.read_text()):
            if block.mark == "not run":
                assert block.language in RUN and len(block.says) > 5, f"{page}:{block.line}"


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page, then end all background processes of its snippets."""
    command = [sys.executable, "-m", "tests.docs.snippets", str(page)]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=280)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
