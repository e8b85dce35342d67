"""Cutting of clips from one file in a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from streamvid.sharder.source.media import Media
from streamvid.sharder.units.encode_unit import attempt_on, put_clip
from streamvid.sharder.units.probe_unit import Finding, attempt
from streamvid.sharder.windows import Window
from streamvid.sharder.work.clips import ClipFolder
from streamvid.video.limits import Limits

if TYPE_CHECKING:
    from streamvid.video.container import Source
    from streamvid.video.encode.cut import Cutter


@dataclass(frozen=True, slots=True)
class CutUnit:
    """Unit of work that copies windows of `media` into files.

    windows: (name of the clip in `clips`, window) pairs.
    verify: True to decode every frame of each clip.
    has_audio: False to omit the audio.
    """

    media: Media
    windows: tuple[tuple[str, Window], ...]
    verify: bool
    has_audio: bool
    clips: ClipFolder
    limits: Limits


def cut_file(unit: CutUnit) -> Finding:
    """Cut clips from a file and store them in the staging folder. Runs in a worker.

    Return {"clips": [one finding per window]}, or a rejection if the file as a whole causes an error.

    Raises SourceError if the file has changed since it was probed, and StorageError if writing fails.
    """
    return attempt_on("cutting", unit.media, unit.clips, lambda source: _cut_all(unit, source))


def _cut_all(unit: CutUnit, source: Source) -> Finding:
    from streamvid.video.container import open_video
    from streamvid.video.encode.cut import Cutter

    with open_video(source, unit.limits) as video:
        cutter = Cutter(source, video, has_audio=unit.has_audio)
        return {
            "clips": [
                attempt("cutting", unit.media.source, partial(_cut, unit, cutter, name, window))
                for name, window in unit.windows
            ]
        }


def _cut(unit: CutUnit, cutter: Cutter, name: str, window: Window) -> Finding:
    return put_clip(unit.clips, name, cutter.cut(window.start, window.num_frames, verify=unit.verify))
