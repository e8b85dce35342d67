"""Fixtures of the command-line tests: a few tiny clips, and the dataset that the command makes of them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streamvid.cli import main
from tests.clips import encode, frames_of
from tests.conftest import run_streamvid

OPTIONS = ("--buckets", "96x64@5,64x96@5", "--workers", "1")


@dataclass(frozen=True)
class Tiny:
    """The folder of the clips, the dataset made of them, and the output of `shard --json`."""

    videos: Path
    dataset: Path
    report: dict[str, Any]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Two clips with caption files, and a file that is not a video."""
    root = tmp_path_factory.mktemp("tiny")
    videos = root / "videos"
    videos.mkdir()
    for name, (width, height) in {"wide": (96, 64), "tall": (64, 96)}.items():
        (videos / f"{name}.mp4").write_bytes(encode(frames_of("bikes", width, height, 12)))
        (videos / f"{name}.txt").write_text(f"a {name} street")
    (videos / "broken.mp4").write_bytes(b"no video at all")
    done = run_streamvid("shard", videos, root / "dataset", *OPTIONS, "--json")
    return Tiny(videos, root / "dataset", json.loads(done.stdout))


Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """A function that runs the streamvid command in this process, for commands that fail early; a process costs a
    second."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = ["streamvid", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        logger = logging.getLogger()
        handlers, level = logger.handlers[:], logger.level
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            logger.handlers[:] = handlers
            logger.setLevel(level)
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), *capsys.readouterr())

    return run
