"""Recipes for small clips of every unusual kind, made from a real clip with the ffmpeg program while the tests run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray

from tests.clips import real_clip

FFMPEG: str = imageio_ffmpeg.get_ffmpeg_exe()

_SMALL = "scale=160:90,setsar=1"
_HIDE = "-auto-alt-ref 1 -lag-in-frames 25 -arnr-maxframes 7 -arnr-strength 3 -g 60"
_HIDE += " -deadline good -cpu-used 1 -b:v 50k -frames:v 60"
_DROP_SOME = f"{_SMALL},select='not(mod(n,3)*mod(n,5)*lt(random(1),0.6))'"

#: file name → ffmpeg's output options, for 40 frames of 160 x 90
ENCODED: dict[str, str] = {
    "h264_open_gop.mp4": "-c:v libx264 -x264-params open-gop=1:keyint=16:bframes=4:b-pyramid=normal",
    "h264_open_gop.mkv": "-c:v libx264 -x264-params open-gop=1:keyint=16:bframes=4",
    "h264_one_gop.mp4": "-c:v libx264 -bf 3 -g 250",
    "h264_refresh.mp4": "-c:v libx264 -x264-params intra-refresh=1:keyint=16:bframes=0",
    "h264_fragments.mp4": "-c:v libx264 -bf 3 -g 12 -movflags +frag_keyframe+empty_moov",
    "h264.ts": "-c:v libx264 -bf 3 -g 12",
    "h264.flv": "-c:v libx264 -bf 3 -g 12",
    "h264_10bit.mp4": "-c:v libx264 -bf 2 -g 12 -pix_fmt yuv420p10le",
    "h264_interlaced.mp4": "-c:v libx264 -flags +ilme+ildct -bf 2",
    "hevc_open_gop.mp4": "-c:v libx265 -x265-params log-level=none:open-gop=1:keyint=16:min-keyint=16:bframes=4",
    "hevc_layers.mp4": "-c:v libx265 -x265-params log-level=none:temporal-layers=3:keyint=16:bframes=4",
    "hevc_10bit.mkv": "-c:v libx265 -pix_fmt yuv420p10le -x265-params log-level=none:keyint=16",
    "vp8_hidden.webm": f"-c:v libvpx {_HIDE}",
    "vp9_hidden.webm": f"-c:v libvpx-vp9 {_HIDE}",
    "vp9_odd.webm": "-c:v libvpx-vp9 -deadline realtime -cpu-used 8 -g 20",
    "av1.mp4": "-c:v libaom-av1 -cpu-used 8 -g 16 -usage realtime",
    "mpeg4.mp4": "-c:v mpeg4 -bf 2 -g 12",
    "mpeg4.avi": "-c:v mpeg4 -bf 0 -g 12",
    "mpeg4_b_frames.avi": "-c:v mpeg4 -bf 2 -g 12",
    "mpeg2.mpg": "-c:v mpeg2video -bf 2 -g 12",
    "mpeg2.m2v": "-c:v mpeg2video -bf 2 -g 12",
    "theora.ogv": "-c:v libtheora -g 12",
    "vp9.ivf": "-c:v libvpx-vp9 -deadline realtime -cpu-used 8 -g 20",
    "prores.mov": "-c:v prores",
    "mjpeg.mov": "-c:v mjpeg",
    "odd_444.mkv": "-c:v libx264 -pix_fmt yuv444p",
    "rgb.mkv": "-c:v libx264rgb",
    "gray.mkv": "-c:v ffv1 -pix_fmt gray",
    "alpha.webm": "-c:v libvpx-vp9 -pix_fmt yuva420p -cpu-used 8",
    "wide_pixels.mp4": "-c:v libx264 -bf 2",
    "tall_pixels.mkv": "-c:v libx264 -bf 2",
    "variable_rate.mp4": "-fps_mode passthrough -c:v libx264 -bf 3 -g 12",
    "variable_rate.avi": "-fps_mode passthrough -c:v mpeg4 -g 12",
}

#: file name → the filter for its frames, if it is not the default one
FILTERS = {
    "h264_interlaced.mp4": "scale=160:96,setsar=1",
    "vp9_odd.webm": "scale=161:91,setsar=1",
    "odd_444.mkv": "scale=161:91,setsar=1",
    "wide_pixels.mp4": "scale=160:90,setsar=4/3",
    "tall_pixels.mkv": "scale=160:90,setsar=3/4",
    "variable_rate.mp4": _DROP_SOME,
    "variable_rate.avi": _DROP_SOME,
}

#: file name → (the encoded clip to copy, ffmpeg's input options), without a new encoding
COPIED: dict[str, tuple[str, list[str]]] = {
    "edit_list.mp4": ("h264_open_gop.mp4", ["-ss", "0.5"]),
    "edit_list_mpeg4.mp4": ("mpeg4.mp4", ["-ss", "0.7"]),
    "variable_rate.mkv": ("variable_rate.mp4", []),
    "turn_90.mp4": ("h264_open_gop.mp4", ["-display_rotation", "90"]),
    "turn_180.mp4": ("h264_open_gop.mp4", ["-display_rotation", "180"]),
    "turn_270.mp4": ("h264_open_gop.mp4", ["-display_rotation", "270"]),
    "turn_90.mkv": ("h264_open_gop.mp4", ["-display_rotation", "90"]),
    "turn_90_wide_pixels.mp4": ("wide_pixels.mp4", ["-display_rotation", "90"]),
    "mirror.mp4": ("h264_open_gop.mp4", ["-display_hflip"]),
    "turn_90_mirror.mp4": ("h264_open_gop.mp4", ["-display_rotation", "90", "-display_hflip"]),
    "turn_270_mirror.mp4": ("h264_open_gop.mp4", ["-display_rotation", "270", "-display_hflip"]),
}

IMAGES: dict[str, str] = {
    "image.jpg": "-pix_fmt yuvj420p",
    "image_444.jpg": "-pix_fmt yuvj444p",
    "image.png": "-pix_fmt rgb24",
    "image_alpha.png": "-pix_fmt rgba",
    "image_palette.png": "-pix_fmt pal8",
    "image_gray.png": "-pix_fmt gray",
    "image_16bit.png": "-pix_fmt rgb48be",
    "image.webp": "-c:v libwebp",
    "image_lossless.webp": "-c:v libwebp -lossless 1 -pix_fmt bgra",
    "image.bmp": "-pix_fmt bgr24",
}

VIDEO_NAMES = [*ENCODED, *COPIED]
IMAGE_NAMES = [*IMAGES]


def run_ffmpeg(*arguments: object) -> bytes:
    """Run the ffmpeg program and return its standard output."""
    command = [FFMPEG, "-nostdin", "-v", "error", "-y", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr.decode()[-600:]}"
    return done.stdout


class ClipFolder:
    """Clips by name, made on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str) -> Path:
        path = self.folder / name
        if path.exists():
            return path
        part = self.folder / f"part_{name}"
        if name in COPIED:
            origin, options = COPIED[name]
            run_ffmpeg(*options, "-i", self(origin), "-c", "copy", part)
        else:
            options = (ENCODED.get(name) or IMAGES[name]).split()
            length = ["-frames:v", "40"] if name in ENCODED else ["-frames:v", "1", "-update", "1"]
            arguments = ["-i", real_clip("bikes"), "-an", "-vf", FILTERS.get(name, _SMALL), *length, *options]
            if "_hidden" in name:  # libvpx hides pictures only in two-pass encoding
                log = ["-passlogfile", self.folder / name]
                run_ffmpeg(*arguments, *log, "-pass", 1, "-f", "null", "-")
                arguments += [*log, "-pass", 2]
            run_ffmpeg(*arguments, part)
        return part.rename(path)


def decode_with_ffmpeg(path: Path, video_filter: str, height: int, width: int) -> NDArray[np.uint8]:
    """Decode all frames of a clip with the ffmpeg program, (T, height, width, 3)."""
    raw = run_ffmpeg(
        *("-noautorotate", "-i", path, "-map", "0:V:0", "-fps_mode", "passthrough", "-enc_time_base", "demux"),
        *("-vf", video_filter, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"),
    )
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


def mean_square_errors(frames: NDArray[np.uint8], frame: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the mean square error of one frame against each of several frames, (T,)."""
    error: NDArray[np.float64] = ((frames.astype(np.float64) - frame) ** 2).mean(axis=(1, 2, 3))
    return error


def psnr(error: float) -> float:
    """Return the PSNR in decibels for a mean square error; 100 for zero."""
    return 100.0 if error == 0 else float(10 * np.log10(255**2 / error))
