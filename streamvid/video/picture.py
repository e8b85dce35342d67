"""Format of decoded pictures: size, memory layout and color accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from streamvid.errors import ConfigError

Pixels = Literal["rgb24", "yuv420p"]
StoredPixels = Literal["rgb24", "yuv420p", "mask"]
Accuracy = Literal["fast", "exact"]


@dataclass(frozen=True, slots=True)
class PictureFormat:
    """Format of decoded pictures of size (height, width).

    pixels: memory layout of uint8 values: "rgb24" has the shape (H, W, 3); "yuv420p" has a Y plane with shape (H, W),
        followed by U and V planes with shape (H/2, W/2); "mask" has the shape (H, W) (see MaskReader).
    accuracy: accuracy of the conversion to RGB. "fast" is swscale's default; on average, it is 1 to 3 levels too dark.
        "exact" has a bias below 0.05 levels and respects the source's chroma siting.

    Raises ConfigError for invalid values.
    """

    height: int
    width: int
    pixels: StoredPixels = "rgb24"
    accuracy: Accuracy = "exact"

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ConfigError(f"picture: the size is {self.width}x{self.height}; both sides must be at least 1")
        for name, value, known in (
            ("pixels", self.pixels, get_args(StoredPixels)),
            ("accuracy", self.accuracy, get_args(Accuracy)),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, known))}")
        if self.pixels == "yuv420p" and (self.height % 2 or self.width % 2):
            raise ConfigError(
                f"pixels='yuv420p' with a size of {self.width}x{self.height}: both sides must be even, because one "
                "chroma sample covers 2 x 2 pixels; use an even size or pixels='rgb24'"
            )

    @property
    def num_bytes(self) -> int:
        """Size of one picture, in bytes."""
        return self.height * self.width * {"rgb24": 6, "yuv420p": 3, "mask": 2}[self.pixels] // 2
