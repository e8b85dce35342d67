"""The only room that uses PyAV: facts about a video (`probe`), its frames as arrays (`decode_into`), new clips.

May import errors and config only. README.md says in which order to read the files.
"""

from __future__ import annotations

from streamvid.video.decode.file import decode_into
from streamvid.video.info import VideoInfo
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.probe import probe
from streamvid.video.transform import Transform

__all__ = ["LIMITS", "Limits", "Transform", "VideoInfo", "decode_into", "probe"]
