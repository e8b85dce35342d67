"""Encoding profiles for native clips, designed for fast decoding.

H.264 decodes fastest if each picture refers only to the previous one, coefficients are coded with CAVLC, deblocking is
off and few bits are spent. x264's psychovisual settings spend bits on appearance, which benefits neither mean squared
error nor training: without them, clips with the same crf have a higher PSNR and fewer bytes, and decode a tenth faster.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from streamvid.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Profile:
    """FFmpeg's names for a codec, its encoder and its decoder, with the default and allowed settings.

    crf: default quality; None for a lossless codec.
    """

    codec: str
    encoder: str
    decoder: str
    crf: int | None
    crf_range: tuple[int, int]
    gop: int
    max_gop: int
    has_fine_crf: bool = False


PROFILES = {
    "h264": Profile("h264", "libx264", "h264", crf=18, crf_range=(1, 51), gop=16, max_gop=600, has_fine_crf=True),
    "av1": Profile("av1", "libsvtav1", "libdav1d", crf=24, crf_range=(1, 63), gop=16, max_gop=600),
    "mjpeg": Profile("mjpeg", "mjpeg", "mjpeg", crf=3, crf_range=(2, 31), gop=1, max_gop=1),
    "ffv1": Profile("ffv1", "ffv1", "ffv1", crf=None, crf_range=(0, 0), gop=1, max_gop=1),
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding options for native clips.

    - codec: "h264" (fast to decode), "av1" (smallest), "mjpeg" (independent pictures), "ffv1" (lossless).
    - crf: quality; lower values mean higher quality and larger clips. The allowed values are 1 to 51 for h264
      (default 18), 1 to 63 for av1 (default 24), and quantizers 2 to 31 for mjpeg (default 3). None selects the
      default, and is the only value allowed for ffv1.
    - gop: number of frames from one key frame to the next, 1 to 600. Each GOP can be decoded on its own. 0 selects the
      codec's default: 16 for h264 and av1; 1 for mjpeg and ffv1, which allow no other value.

    After construction, `crf` and `gop` contain the values that are used. Raises ConfigError for invalid values.
    """

    codec: str = "h264"
    crf: float | None = None
    gop: int = 0

    def __post_init__(self) -> None:
        if self.codec not in PROFILES:
            raise ConfigError(f"codec is {self.codec!r}; it must be one of {', '.join(PROFILES)}")
        profile = self.profile
        object.__setattr__(self, "crf", profile.crf if self.crf is None else self._checked_crf(self.crf))
        if not _is_int(self.gop) or not 0 <= self.gop <= profile.max_gop:
            allowed = (
                f"a whole number from 1 to {profile.max_gop}"
                if profile.max_gop > 1
                else "1 (every frame is a key frame)"
            )
            raise ConfigError(f"gop is {self.gop!r}; for {self.codec}, it must be {allowed}, or 0 for the default")
        object.__setattr__(self, "gop", self.gop or profile.gop)

    def _checked_crf(self, crf: float) -> float:
        profile, (low, high) = self.profile, self.profile.crf_range
        if profile.crf is None:
            raise ConfigError(f"crf is {crf!r}, but {self.codec} is lossless; omit crf, or choose another codec")
        is_number = _is_int(crf) or (profile.has_fine_crf and isinstance(crf, float))
        if not is_number or not low <= crf <= high:
            kind = "a number" if profile.has_fine_crf else "a whole number"
            raise ConfigError(f"crf is {crf!r}; for {self.codec}, it must be {kind} from {low} to {high}")
        return int(crf) if crf == int(crf) else crf

    @property
    def profile(self) -> Profile:
        return PROFILES[self.codec]

    def smaller(self, times: float) -> Encoding | None:
        """Return a lower-quality encoding with about 1/`times` of the bytes, or None at the lowest quality."""
        highest = self.profile.crf_range[1]
        if self.crf is None or self.crf >= highest:
            return None
        # x264's rate factor: plus 6 halves the bytes.
        return replace(self, crf=min(highest, self.crf + max(1, int(6 * math.log2(times)))))

    def encoder_options(self) -> dict[str, str]:
        """Return the options for FFmpeg's encoder; threads and key frame distance are set on the encoder itself."""
        if self.codec == "h264":
            return {"preset": "medium", "tune": "fastdecode", "crf": str(self.crf), "a53cc": "0", **self._x264()}
        if self.codec == "av1":
            # irefresh-type=2: closed GOPs. tune=1: PSNR. lp=1: one thread, for reproducible bytes.
            own = "lp=1:irefresh-type=2:tune=1:fast-decode=1:enable-stat-report=0"
            return {"preset": "8", "crf": str(self.crf), "svtav1-params": own}
        if self.codec == "mjpeg":
            return {"qmin": str(self.crf), "qmax": str(self.crf), "huffman": "optimal"}
        # Rice coding needs a third less decoding than the range coder, for 3 % more bytes. Checksums detect damage.
        return {"level": "3", "coder": "rice", "context": "0", "slices": "4", "slicecrc": "1"}

    def _x264(self) -> dict[str, str]:
        settings = {
            "keyint": self.gop,
            "min-keyint": self.gop,
            "scenecut": 0,
            "open-gop": 0,
            "bframes": 0,
            "ref": 1,
            "cabac": 0,
            "no-deblock": 1,
            "weightp": 0,
            "psy": 0,
            "aq-mode": 0,
            "trellis": 0,
            # No look-ahead beyond the next key frame, and few frames are held.
            "rc-lookahead": min(16, self.gop),
            "sync-lookahead": 0,
            "lookahead-threads": 1,
            "threads": 1,
            # The same bytes on every processor.
            "cpu-independent": 1,
        }
        return {"x264-params": ":".join(f"{name}={value}" for name, value in settings.items())}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@cache
def encoder_versions() -> dict[str, str]:
    """Return the versions of "av", "ffmpeg" and "x264". Other versions may produce different bytes."""
    import av

    picture = av.VideoFrame(64, 64, "yuv420p")
    picture.pts = 0
    encoder = av.CodecContext.create("libx264", "w")
    encoder.width = 64
    encoder.height = 64
    encoder.pix_fmt = "yuv420p"
    encoder.time_base = Fraction(1, 25)
    encoder.thread_count = 1
    # x264 states its version only in its output.
    written = b"".join(bytes(packet) for packet in [*encoder.encode(picture), *encoder.encode(None)])
    x264 = re.search(rb"x264 - (core \d+)", written)
    return {
        "av": av.__version__,
        "ffmpeg": str(av.ffmpeg_version_info),
        "x264": x264[1].decode() if x264 else "unknown",
    }
