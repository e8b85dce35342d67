"""Properties of a video or an image that probing finds, as plain values that need neither PyAV nor numpy.

VideoInfo is flat on purpose: users read its fields by name, and most are columns of the samples index.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """Properties of one video or image. Frames are counted from packets.

    Throughout streamvid, frame number i is the frame with the i-th smallest timestamp, counting from 0.

    - width, height: display size in pixels, after cropping, conversion to square pixels (the height is kept, the width
      is stretched) and rotation.
    - coded_width, coded_height: size of a decoded frame, before these steps.
    - margins: pixels of a decoded frame that the container crops: (left, top, right, bottom), rounded to even sizes.
    - sample_aspect_ratio: (width, height) of one pixel; (1, 1) if the file does not declare it.
    - flip, rotation: to display a decoded frame, mirror it left to right if `flip`, then rotate it clockwise by
      `rotation` (0, 90, 180 or 270 degrees). Together they express all eight EXIF orientations.
    - fps: average frame rate: (num_frames - 1) divided by the time between the first and the last timestamp; the
      declared rate for a video with one frame; 0.0 for an image.
    - duration_seconds: time from the first timestamp to the end of the last frame; 0.0 for an image.
    - last_duration: duration of the last displayed frame, in ticks; 0 if the file does not declare it.
    - time_base: seconds per tick of `timestamps`.
    - color_space: matrix that converts decoded frames to RGB: "bt601", "bt709", "bt2020", "smpte240m", "fcc",
      or "rgb" (no conversion).
    - color_range: "limited" or "full".
    - is_color_guessed: True if the file declares no matrix. JPEG, WebP and VP8 are then BT.601 by definition; for other
      codecs, frames with a longer side of at least 1280 or a shorter side of at least 720 (as coded) count as BT.709,
      and smaller frames as BT.601. An undeclared range is "limited", except for formats that are full by definition.
    - has_centered_chroma: True if the codec sites 4:2:0 chroma samples at the center of their 2 x 2 pixels; False if
      they are at the left, midway between the rows.
    - keyframes: frame numbers of the key frames.
    - max_keyframe_distance: maximum number of frames from one key frame to the next, or to the end.
    - is_interlaced: True if the decoder reports the first frame as interlaced. Frames are never deinterlaced.
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
    margins: tuple[int, int, int, int] = (0, 0, 0, 0)
