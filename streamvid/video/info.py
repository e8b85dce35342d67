"""Facts that probing found about a video or an image: plain values, no PyAV, no numpy.

VideoInfo is flat on purpose: users read its fields by name, and most are columns of the samples index.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """The facts of one video (or image), frames counted from packets.

    Frame number i, everywhere in streamvid, is the i-th smallest of `timestamps`.

    - width, height: the display size in pixels: after conversion to square pixels (the height is kept, the width is
      stretched) and after rotation.
    - coded_width, coded_height: the size of a decoded frame, before both steps.
    - sample_aspect_ratio: (width, height) of one pixel; (1, 1) if the file does not state it.
    - flip, rotation: to display a decoded frame, mirror it left to right if `flip`, then rotate it clockwise by
      `rotation` (0, 90, 180 or 270 degrees). Together they express all eight EXIF orientations.
    - fps: the average, (num_frames - 1) over the time between first and last timestamp; 0.0 for an image.
    - duration_seconds: from the first timestamp to the end of the last frame; 0.0 for an image.
    - last_duration: of the last frame shown, in ticks; 0 if the file does not state it.
    - time_base: seconds per tick of `timestamps`.
    - color_space: the matrix that converts decoded frames to RGB: "bt601", "bt709", "bt2020", "smpte240m", "fcc",
      or "rgb" (no conversion). color_range: "limited" or "full".
    - is_color_guessed: the file names no matrix. Images, JPEG and VP8 are then BT.601 by their definition; for all
      others, frames with a longer side of 1280 or more or a shorter side of 720 or more (as coded) count as BT.709 and
      smaller ones as BT.601. An unnamed range counts as "limited" except for formats that are full by definition.
    - has_centered_chroma: if one color sample stands for 2 x 2 pixels, it is sited at their center, by the codec's
      definition; else at the left, between the rows.
    - keyframes: frame numbers of the key frames. max_keyframe_distance: the maximum number of frames from one key frame
      to the next, or to the end.
    - is_interlaced: the decoder reported the first frame as interlaced. Frames are used as they are, not deinterlaced.
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
