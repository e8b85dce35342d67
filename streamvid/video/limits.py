"""Limits on untrusted files: sizes, counts, formats and codecs.

Without these limits, a file of a few hundred kilobytes can require gigabytes of memory. The lists contain FFmpeg's
names of the allowed demuxers and decoders; all other formats are rejected before any byte is parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from streamvid.errors import ConfigError

#: Containers whose packets carry reliable times: one packet per frame, each with its timestamp, seekable.
EXACT_CONTAINERS = frozenset({"mov", "matroska"})

#: Still images: FFmpeg's "pipe" demuxers, which look at the content and never open another file.
IMAGE_CONTAINERS = frozenset({"jpeg_pipe", "png_pipe", "webp_pipe", "bmp_pipe", "tiff_pipe"})

#: Brands of still images in containers of the MP4 family (HEIF, ISO/IEC 23008-12, and AVIF), and of sequences there.
STILL_BRANDS = frozenset({b"avif", b"heic", b"heix", b"heim", b"heis", b"mif1"})
SEQUENCE_BRANDS = frozenset({b"avis", b"hevc", b"hevx", b"hevm", b"hevs", b"msf1"})

#: Containers that hold only audio. They are allowed where audio is read, in addition to those of `Limits`.
AUDIO_CONTAINERS = ("wav", "flac", "mp3")

CONTAINERS = (
    *("mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm"),
    *("avi", "mpegts", "mpeg", "mpegvideo", "flv", "asf", "ogg", "ivf", "gif"),
    *sorted(IMAGE_CONTAINERS),
)

CODECS = (
    *("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg2video", "mpeg1video", "h263", "flv1", "vc1", "msmpeg4v3"),
    *("mjpeg", "prores", "dnxhd", "ffv1", "huffyuv", "ffvhuff", "utvideo", "qtrle", "rawvideo"),
    *("wmv1", "wmv2", "wmv3", "msmpeg4v2", "theora", "gif"),
    *("png", "webp", "bmp", "tiff"),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on media files.

    If a file exceeds a limit, `probe` raises ProbeError, and `decode_into` raises DecodeError.
    """

    max_bytes: int = 16 << 30
    max_pixels: int = 8192 * 4320  #: per frame, counted as in FFmpeg: some decoders pad rows to 64 pixels
    max_frames: int = 500_000
    max_seconds: float = 12 * 3600.0
    max_streams: int = 64
    containers: tuple[str, ...] = CONTAINERS
    codecs: tuple[str, ...] = CODECS
    allow_hdr: bool = False  #: accept PQ and HLG, and deliver their frames without tone mapping

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("max_") and not value > 0:
                raise ConfigError(f"limits: {field.name} is {value!r}; it must be above 0")
            if isinstance(field.default, tuple) and (
                not value or not all(re.fullmatch(r"[a-z0-9_]+", name) for name in value)
            ):
                raise ConfigError(
                    f"limits: {field.name} is {value!r}; it must be a non-empty tuple of FFmpeg names, such as 'h264' "
                    "or 'mov'"
                )


LIMITS = Limits()

#: Limits for datasets: everything that was admitted during sharding, including HDR, is delivered.
STORED_LIMITS = Limits(allow_hdr=True)
