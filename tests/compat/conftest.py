"""Clips with metadata in the form of DiffSynth-Studio, and the clips of the command-line tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from tests.cli.conftest import tiny
from tests.clips import encode, frames_of
from tests.files import write_rows

__all__ = ["make_videos", "tiny"]


def make_videos(
    folder: Path, clips: Mapping[str, tuple[int, int, int]], controlled: Collection[str], prompt: str
) -> Path:
    """Write clips of (width, height, frames), control videos for those in `controlled`, and their metadata.csv."""
    folder.mkdir()
    rows = []
    for number, (name, (width, height, count)) in enumerate(clips.items()):
        (folder / f"{name}.mp4").write_bytes(encode(frames_of("bikes", width, height, count)))
        control = f"{name}_edges.mp4" if name in controlled else ""
        if control:
            (folder / control).write_bytes(encode(frames_of("carphone_pristine", width, height, count)))
        row = {"video": f"{name}.mp4", "prompt": prompt.format(name), "control_video": control, "score": number}
        rows.append(row)
    write_rows(folder / "metadata.csv", rows)
    return folder
