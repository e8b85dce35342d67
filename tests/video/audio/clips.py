"""Clips with a white frame and a click at known times, in many containers and codecs, made by the ffmpeg program.

The reference for the times of clicks is the ffmpeg program too: its decoded samples and their timestamps.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.video.clips import FFMPEG, run_ffmpeg

RATE = 48000
FPS = 25
#: Numbers of the white frames; a click sounds at the start of each.
FLASHES = (12, 37, 61, 88)
NUM_FRAMES = 100
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Kind:
    """Container with a video and an audio codec.

    ending: file name extension. audio, video: FFmpeg options.
    """

    ending: str
    audio: str
    video: str = "-c:v libx264 -preset ultrafast -bf 2 -g 25"
    rate: int = RATE

    @property
    def name(self) -> str:
        return f"{self.audio.split()[1]}_{self.ending}"

    @property
    def is_exact(self) -> bool:
        return self.audio.startswith(("-c:a pcm", "-c:a flac", "-c:a alac"))


_MPEG4 = "-c:v mpeg4 -bf 0 -g 25"
KINDS = {
    kind.name: kind
    for kind in (
        Kind("mp4", "-c:a aac -b:a 128k -aac_pns 0"),  # without noise, so that windows are exact
        Kind("mp4", "-c:a libopus"),
        Kind("mp4", "-c:a alac"),
        Kind("mp4", "-c:a flac -strict -2"),
        Kind("mp4", "-c:a libmp3lame", rate=44100),
        Kind("mp4", "-c:a ac3"),
        Kind("mov", "-c:a pcm_s16le"),
        Kind("mov", "-c:a pcm_s24le", rate=44100),
        Kind("avi", "-c:a pcm_s16le", _MPEG4),
        Kind("avi", "-c:a libmp3lame", _MPEG4),
        Kind("mkv", "-c:a flac"),
        Kind("mkv", "-c:a pcm_s16le", rate=44100),
        Kind("mkv", "-c:a aac", rate=44100),
        Kind("mkv", "-c:a eac3"),
        Kind("webm", "-c:a libopus", "-c:v libvpx -deadline realtime -cpu-used 8"),
        Kind("webm", "-c:a libvorbis", "-c:v libvpx -deadline realtime -cpu-used 8", rate=44100),
        Kind("ts", "-c:a aac", rate=44100),
        Kind("ts", "-c:a mp2"),
        Kind("ts", "-c:a ac3"),
        Kind("flv", "-c:a aac"),
        Kind("flv", "-c:a libmp3lame", rate=44100),
        Kind("ogv", "-c:a libvorbis", "-c:v libtheora", rate=44100),
        Kind("ogv", "-c:a libopus", "-c:v libtheora"),
        Kind("mpg", "-c:a mp2", "-c:v mpeg2video -bf 2 -g 12"),
        Kind("wmv", "-c:a wmav2", "-c:v wmv2"),
    )
}


def track(rate: int, seconds: float = NUM_FRAMES / FPS) -> Float32s:
    """Return a track of quiet noise with 16-bit values and a click at the start of each white frame.

    A click is a pulse of a fifth of a millisecond: short, but within the band of every codec and rate.
    """
    noise = np.random.default_rng(7).standard_normal(round(seconds * rate)) * 1e-3
    for flash in FLASHES:
        center = flash * rate // FPS
        places = np.arange(center - 60, center + 61)
        noise[places] += 0.8 * np.exp(-(((places - center) / (rate * 1e-4)) ** 2))
    return (np.rint(noise * 32767) / 32768).astype(np.float32)


def make_clip(kind: Kind, path: Path, *, offset: float = 0.0, video_filter: str = "null") -> Path:
    """Make a clip.

    offset: delay of the audio in seconds.
    """
    sound = path.with_suffix(".f32")
    sound.write_bytes(track(kind.rate).tobytes())
    white = "+".join(f"eq(n,{flash})" for flash in FLASHES)
    lit = f"drawbox=c=white:t=fill:enable='{white}',{video_filter}"
    run_ffmpeg(
        *("-f", "lavfi", "-i", f"color=black:s=96x64:r={FPS}:d={NUM_FRAMES / FPS}"),
        *("-f", "f32le", "-ar", kind.rate, "-ac", 1, "-i", sound, "-map", 0, "-map", 1, "-vf", lit),
        *("-af", f"asetpts=PTS+{offset}/TB", "-pix_fmt", "yuv420p", "-fps_mode", "passthrough"),
        *(*kind.video.split(), *kind.audio.split(), path),
    )
    sound.unlink()
    return path


@dataclass(frozen=True)
class Truth:
    """Result of decoding a clip with the ffmpeg program: times of all frames and clicks, in seconds.

    - audio: (first time, mono samples) of each decoded audio frame.
    """

    frame_times: tuple[float, ...]
    flash_times: tuple[float, ...]
    click_times: tuple[float, ...]
    sounds: tuple[tuple[Fraction, Float32s], ...]
    rate: int


def ffmpeg_truth(path: Path) -> Truth:
    """Decode a clip with the ffmpeg program, keeping the file's timestamps."""
    frames, log = _decoded(path, "0:V:0", "-vf", "showinfo,scale=1:1,format=gray", "-f", "rawvideo")
    base = Fraction(re.findall(r"config in time_base: (\d+/\d+)", log)[0])
    times = [float(int(pts) * base) for pts in re.findall(r"\] n: *\d+ pts: *(-?\d+)", log)]
    light = np.frombuffer(frames, np.uint8)
    flashes = [time for time, value in zip(times, light, strict=True) if value > 128]
    raw, log = _decoded(path, "0:a:0", "-af", "aformat=flt,pan=mono|c0=c0,ashowinfo", "-f", "f32le")
    found = re.findall(r"n:\d+ pts:(-?\d+) .*? rate:(\d+) nb_samples:(\d+)", log)
    values, at, sounds = np.frombuffer(raw, np.float32), 0, []
    for pts, rate, count in found:
        sounds.append((Fraction(int(pts), int(rate)), values[at : at + int(count)]))
        at += int(count)
    rate = int(found[0][1]) if found else RATE
    clicks = [float(time) for time in _click_times(sounds, rate)]
    return Truth(tuple(times), tuple(flashes), tuple(clicks), tuple(sounds), rate)


def _click_times(sounds: list[tuple[Fraction, Float32s]], rate: int) -> list[Fraction]:
    """Return the times of the clicks; consecutive frames are searched together, because a click may span two."""
    found, begin, run = list[Fraction](), Fraction(0), np.zeros(0, np.float32)
    for start, part in [*sounds, (Fraction(10**6), run)]:
        if abs(start - begin - Fraction(len(run), rate)) > Fraction(1, 500):
            found += [begin + Fraction(place, rate) for place in peaks(run)]
            begin, run = start, part
        else:
            run = np.concatenate([run, part])
    return found


def peaks(samples: Float32s, least: float = 0.2) -> list[int]:
    """Return the positions of the clicks, each the largest value within 5 ms."""
    loud, found = np.flatnonzero(samples > least), list[int]()
    for place in loud.tolist():
        if found and place - found[-1] < 240:
            if samples[place] > samples[found[-1]]:
                found[-1] = place
        else:
            found.append(place)
    return found


def _decoded(path: Path, stream: str, *options: str) -> tuple[bytes, str]:
    # With several threads, the program loses the FLAC and ALAC frames that follow frames discarded by an edit list.
    command = [FFMPEG, "-nostdin", "-hide_banner", "-copyts", "-threads", "1", "-i", str(path), "-map", stream]
    done = subprocess.run([*command, "-fps_mode", "passthrough", *options, "-"], capture_output=True, check=True)
    return done.stdout, done.stderr.decode(errors="replace")
