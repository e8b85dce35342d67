"""The result of encoding or cutting a clip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MadeClip:
    """A file that was encoded or cut from a source, and the properties of the frames that it shows.

    data: contents of the file.
    extension: "mp4", or "jpg" or "png" for images.
    codec: FFmpeg's name for the codec.
    fps: average frame rate; 0.0 for an image.
    duration_seconds: time until the end of the last frame; 0.0 for an image.
    width, height: display size in pixels.
    psnr_y: luma PSNR in decibels, relative to the encoder's input (the source after one resize); 100.0 if lossless;
        None if nothing was encoded.
    encode_seconds: CPU time for decoding, encoding and verification; 0.0 if nothing was encoded.
    has_audio: True if there is an audio track.
    """

    data: bytes
    extension: str
    codec: str
    num_frames: int
    fps: float
    duration_seconds: float
    width: int
    height: int
    psnr_y: float | None = None
    encode_seconds: float = 0.0
    has_audio: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.data)
