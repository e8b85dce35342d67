"""Sources whose rows name several files. A control video's frames show the number of the clip's frame plus 2000."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.clips import encode, frames_of
from tests.video.clips import run_ffmpeg
from tools import make_corpus

CONTROL, REFERENCE = 2000, 50
WIDTH, HEIGHT = 192, 128
MEDIA = {"control": "control_video", "mask:matte": "matte", "reference?": "refs"}
Pictures = np.ndarray[Any, np.dtype[np.uint8]]


def numbered(frames: Pictures, first: int) -> Pictures:
    """Return the frames with the numbers `first`, `first` + 1, … burned in."""
    frames = frames.copy()
    for number, picture in enumerate(frames, first):
        make_corpus.burn_number(picture, number)
    return frames


def clip_of(frames: Pictures, container: str = "mp4", **options: Any) -> bytes:
    """Encode the frames without burning in numbers."""
    return encode(frames, container=container, numbered=False, **options)


def picture_of(frame: Pictures) -> bytes:
    return encode(frame[None], codec="mjpeg", container="image2pipe", options={"strict": "-1"}, numbered=False)


def png_of(frame: Pictures) -> bytes:
    codec: Any = av.CodecContext.create("png", "w")
    codec.height, codec.width = frame.shape[:2]
    codec.pix_fmt, codec.time_base = "rgb24", Fraction(1, 25)
    picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
    picture.pts = 0
    return b"".join(bytes(packet) for packet in [*codec.encode(picture), *codec.encode(None)])


def matte_of(num_frames: int) -> Pictures:
    """Return frames of which frame i is white from the left edge up to (i + 1) / num_frames of its width."""
    frames = np.zeros((num_frames, HEIGHT, WIDTH, 3), np.uint8)
    for number, picture in enumerate(frames, 1):
        picture[:, : WIDTH * number // num_frames] = 255
    return frames


def make_rows(folder: Path, num_clips: int = 6) -> list[dict[str, Any]]:
    """Write clips of 24 or more frames; clip k has numbers from 100 k, its reference images 100 k + 50 and 100 k + 51.

    Control videos use another container, with timestamps in whole milliseconds, and have half the width and height.
    Clip k has k % 3 reference images.
    """
    rows = []
    for k in range(num_clips):
        count = 24 + k
        clip = numbered(frames_of("bikes", WIDTH, HEIGHT, count), 100 * k)
        control = numbered(frames_of("carphone_pristine", WIDTH // 2, HEIGHT // 2, count), CONTROL + 100 * k)
        (folder / f"clip{k}.mp4").write_bytes(clip_of(clip))
        (folder / f"control{k}.mkv").write_bytes(clip_of(control, "matroska", options={"crf": "12", "g": "9"}))
        (folder / f"matte{k}.mp4").write_bytes(clip_of(matte_of(count)))
        refs = []
        for item in range(k % 3):
            picture = numbered(frames_of("bigbuckbunny", 160, 120, 1), 100 * k + REFERENCE + item)[0]
            (folder / f"ref{k}-{item}.jpg").write_bytes(picture_of(picture))
            refs.append(f"ref{k}-{item}.jpg")
        names = {"control_video": f"control{k}.mkv", "matte": f"matte{k}.mp4", "refs": refs}
        rows.append({"path": f"clip{k}.mp4", "caption": f"clip {k}", "score": k / 2, **names})
    return rows


def uneven_clip(frames: Pictures, container: str, ticks: list[int], rate: int = 1000) -> bytes:
    """Encode frames with the given timestamps, in units of 1/rate second."""
    import io

    sink = io.BytesIO()
    with av.open(sink, "w", format=container) as output:
        stream: Any = output.add_stream("libx264", rate=25, options={"g": "6", "bf": "0", "crf": "16"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, rate)
        for picture, tick in zip(frames, ticks, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = tick, Fraction(1, rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return sink.getvalue()


def turned(folder: Path, frames: Pictures) -> Path:
    """Write a video that is stored sideways and displayed upright through its rotation metadata."""
    lying, path = folder / "lying.mp4", folder / "turned.mp4"
    lying.write_bytes(clip_of(np.ascontiguousarray(np.rot90(frames, 1, (1, 2)))))
    # ffmpeg's display rotation is counterclockwise, so 270 undoes the turn of the stored frames.
    run_ffmpeg("-display_rotation", 270, "-i", lying, "-c", "copy", path)
    lying.unlink()
    return path
