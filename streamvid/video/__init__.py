"""The only room that uses PyAV: what a video is (`probe`), and its frames as arrays (`decode_into`)."""

from __future__ import annotations

from streamvid.video.decode.file import decode_into
from streamvid.video.info import VideoInfo
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.probe import probe
from streamvid.video.transform import Transform

__all__ = ["LIMITS", "Limits", "Transform", "VideoInfo", "decode_into", "probe"]
