"""A few tiny clips, and the dataset that the command makes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clips import encode, frames_of
from tests.conftest import run_streamvid

OPTIONS = ("--buckets", "96x64@5,64x96@5", "--workers", "1")


@dataclass(frozen=True)
class Tiny:
    """Where the clips lie, the dataset made of them, and what `shard --json` said of it."""

    videos: Path
    dataset: Path
    report: dict[str, Any]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Two clips, each with a caption beside it, and a file that is no video."""
    root = tmp_path_factory.mktemp("tiny")
    videos = root / "videos"
    videos.mkdir()
    for name, (width, height) in {"wide": (96, 64), "tall": (64, 96)}.items():
        (videos / f"{name}.mp4").write_bytes(encode(frames_of("bikes", width, height, 12)))
        (videos / f"{name}.txt").write_text(f"a {name} street")
    (videos / "broken.mp4").write_bytes(b"no video at all")
    done = run_streamvid("shard", videos, root / "dataset", *OPTIONS, "--json")
    return Tiny(videos, root / "dataset", json.loads(done.stdout))


def files_of(root: Path) -> dict[str, bytes]:
    """Path → content of all files below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
