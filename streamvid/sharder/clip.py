"""What is stored of a file: a clip, or a further medium of a sample."""

from __future__ import annotations

from dataclasses import dataclass

TEXT_EXTENSION = "txt"
"""Of a sample without pictures: its clip is its caption's own member."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip as it is stored, or is to be: then num_bytes is 0 and path empty.

    - path: where its bytes lie now. sha256: of an encoded clip; "" where it is a copy of its source.
    - psnr_y: in decibels, None for a copy. encode_seconds: of CPU.
    """

    path: str
    num_bytes: int
    extension: str
    codec: str
    num_frames: int
    fps: float
    duration_seconds: float
    width: int
    height: int
    sha256: str = ""
    psnr_y: float | None = None
    encode_seconds: float = 0.0
