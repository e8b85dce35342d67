"""Facts about a video or an image that probing found: plain values, no PyAV, no numpy.

VideoInfo is flat on purpose: users read its fields by name, and most are columns of the samples index.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """The facts of one video (or image), frames counted from packets.

    Frame number i, everywhere in streamvid, is the i-th smallest of `timestamps`.

    - width, height: the display size in pixels: after non-square pixels are made square (the height is kept, the width
      is stretched) and after rotation.
    - coded_width, coded_height: the size of a decoded frame, before both.
    - sample_aspect_ratio: (width, height) of one pixel; (1, 1) where the file says nothing.
    - flip, rotation: to display a decoded frame, mirror it left to right if `flip`, then turn it clockwise by
      `rotation` (0, 90, 180 or 270 degrees). Together they say all eight EXIF orientations.
    - fps: the average, (num_frames - 1) over the time between first and last timestamp; 0.0 for an image.
    - duration_seconds: from the first timestamp to the end of the last frame; 0.0 for an image.
    - last_duration: of the frame shown last, in ticks; 0 where the file does not say.
    - time_base: seconds a tick of `timestamps`.
    - color_space: the matrix that turns the decoded frames into RGB: "bt601", "bt709", "bt2020", "smpte240m", "fcc",
      or "rgb" (nothing to turn). color_range: "limited" or "full".
    - is_color_guessed: the file names no matrix. Then images, JPEG and VP8 are BT.601 by their definition; of all
      others, frames with a longer side of 1280 or more or a shorter side of 720 or more (as coded) are taken for
      BT.709 and smaller ones for BT.601. An unnamed range is "limited" but for the formats that are full by definition.
    - has_centered_chroma: where one colour sample stands for 2 x 2 pixels, it lies in their middle, by the codec's
      definition; else at the left, between the rows.
    - keyframes: frame numbers of the key frames. max_keyframe_distance: the most frames from one key frame up to the
      next, or to the end.
    - is_interlaced: the decoder called the first frame interlaced. Frames are used as they are, not deinterlaced.
    """

    width: int
    height: int
    coded_width: int
    coded_height: int
    sample_aspect_ratio: tuple[int, int]
    rotation: int
    flip: bool
    num_frames: int
    fps: float
    duration_seconds: float
    time_base: Fraction
    codec: str
    pixel_format: str
    container: str
    color_space: str
    color_range: str
    is_color_guessed: bool
    has_centered_chroma: bool
    is_interlaced: bool
    num_keyframes: int
    max_keyframe_distance: int
    has_audio: bool
    is_image: bool
    timestamps: tuple[int, ...]
    keyframes: tuple[int, ...]
    last_duration: int = 0
