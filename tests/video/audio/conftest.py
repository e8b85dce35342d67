"""Fixtures for clips with audio, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.video.audio.clips import KINDS, make_clip
from tests.video.clips import run_ffmpeg


class SoundClips:
    """Clips by name, made on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, kind: str, offset: float = 0.0, video_filter: str = "null") -> Path:
        """Return the path of a clip of `KINDS`."""
        name = f"{offset}_{abs(hash(video_filter)) % 1000}_{kind}"
        path = self._folder / f"{name}.{KINDS[kind].ending}"
        return path if path.exists() else make_clip(KINDS[kind], path, offset=offset, video_filter=video_filter)

    def copied(self, kind: str, options: str, *, before: str = "", ending: str = "", offset: float = 0.0) -> Path:
        """Return a copy of a clip's packets, made by ffmpeg with output `options` and input options `before`."""
        origin = self(kind, offset)
        path = self._folder / f"{abs(hash((options, before))) % 10**9}_{origin.stem}.{ending or KINDS[kind].ending}"
        if not path.exists():
            run_ffmpeg(*before.split(), "-i", origin, "-map", 0, "-c", "copy", *options.split(), path)
        return path


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> SoundClips:
    """Function `sound(kind)` that returns the path of a clip of tests/video/audio/clips.py."""
    return SoundClips(tmp_path_factory.mktemp("sound"))


Make = Callable[[SoundClips], Path]
