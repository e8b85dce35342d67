"""Compare delivered audio with the output of the ffmpeg program: python -m tools.compare_audio FILE_OR_FOLDER...

Every window begins at a random frame of a video and has the stream's own rate and channels. streamvid decodes it
through the container and, if possible, from indexed packets. The ffmpeg program decodes the same file. A window is
right if

- each of its audio frames is in the window at the time that ffmpeg's timestamps give, relative to the same video frame,
  within --tolerance (1 ms);
- the samples are equal within 1e-4 of full scale. Frames of AAC and AC-3 may instead have a correlation of 0.9, or the
  same loudness within 3 dB, because decoders fill in noise that differs in every window; and
- it is silent where ffmpeg has no audio.

streamvid counts frames whose timestamps fluctuate, and does not place them by these timestamps
(streamvid/video/audio/README.md). Such a frame may be up to 10 ms off (25 ms in Vorbis) if the median frame of its
window is not. The output reports these frames.

The first window is the whole track (at most 60 s), in which the noise of AAC equals ffmpeg's. For each file, the output
lists the windows, the wrong windows, the largest time difference, the number of equal frames, and a note if ffmpeg has
different times for video frames. Files without audio or video are omitted. The exit status is 1 if a window is wrong.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray

from streamvid.errors import ProbeError, StreamvidError
from streamvid.video.audio.file import decode_audio_file
from streamvid.video.audio.grid import LAYOUTS, AudioFormat, first_sample_at
from streamvid.video.audio.index import AudioIndex, index_audio
from streamvid.video.audio.stored import decode_audio_packets
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import open_video
from streamvid.video.limits import LIMITS
from streamvid.video.packets import read_packets

Samples = NDArray[np.float32]
#: Container endings of videos.
ENDINGS = {
    *(
        ".3g2",
        ".3gp",
        ".asf",
        ".avi",
        ".divx",
        ".f4v",
        ".flv",
        ".m2ts",
        ".m4v",
        ".mkv",
        ".mov",
        ".mp4",
        ".mpeg",
        ".mpg",
    ),
    *(".mts", ".ogg", ".ogm", ".ogv", ".qt", ".ts", ".vob", ".webm", ".wmv"),
}
#: Codecs whose decoders fill in noise that the encoder left out.
_NOISY = ("aac", "ac3", "eac3")
_EQUAL, _ALIKE, _LEVEL_DB, _QUIET = 1e-4, 0.9, 3, 1e-4
_MAX_TRACK_SECONDS = 60
_JITTER_SECONDS = {"vorbis": 0.025}


@dataclass(frozen=True)
class Track:
    """Output of the ffmpeg program for a file: times of its video frames, and (time, samples) of its audio frames."""

    frame_times: tuple[Fraction, ...]
    frames: tuple[tuple[Fraction, Samples], ...]


@dataclass
class Result:
    """Results for one file. problems: descriptions of the wrong windows."""

    container: str
    codec: str
    num_windows: int = 0
    num_frames: int = 0
    num_equal: int = 0
    largest_shift: float = 0.0
    problems: list[str] = field(default_factory=list)
    num_jittered: int = 0
    note: str = ""


def ffmpeg_track(path: Path, stream: int, audio: AudioFormat) -> Track:
    """Decode a file with the ffmpeg program. stream: index of its audio stream."""
    _, log = _run(path, "0:V:0", "-vf", "showinfo,scale=2:2", "-f", "null")
    base = Fraction(re.findall(r"config in time_base: (\d+/\d+)", log)[0])
    times = tuple(int(pts) * base for pts in re.findall(r"\] n: *\d+ pts: *(-?\d+)", log))
    layout = f"aformat=sample_fmts=flt:channel_layouts={LAYOUTS[audio.num_channels]}"
    raw, log = _run(path, f"0:{stream}", "-af", f"{layout},ashowinfo", "-f", "f32le")
    values = np.frombuffer(raw, np.float32).reshape(-1, audio.num_channels).T
    frames, at = list[tuple[Fraction, Samples]](), 0
    for pts, rate, count in re.findall(r"n:\d+ pts:(-?\d+) .*? rate:(\d+) nb_samples:(\d+)", log):
        if int(rate) != audio.sample_rate:
            raise ProbeError("the sample rate changes", kind="rate")
        frames.append((Fraction(int(pts), int(rate)), values[:, at : at + int(count)]))
        at += int(count)
    return Track(times, tuple(frames))


def _run(path: Path, stream: str, *options: str) -> tuple[bytes, str]:
    # With several threads, the program loses FLAC and ALAC frames after those that an edit list discards.
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-copyts", "-threads", "1"]
    command += ["-i", str(path), "-map", stream, "-fps_mode", "passthrough", *options, "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    return done.stdout, done.stderr.decode(errors="replace")


def compare_file(path: Path, num_windows: int, tolerance: float) -> Result | None:
    """Compare random windows of a file. Return None if the file has no audio or no video.

    tolerance: in seconds. Raises ProbeError if streamvid rejects the file.
    """
    with open_video(path, LIMITS) as video:
        container = video.container_name
        stream = audio_stream(video)
        if stream is None:
            return None
        context, number = stream.codec_context, stream.index
        rate, channels = context.sample_rate, context.layout.nb_channels
        table = read_packets(video)
        times = [time * table.time_base for time in table.timestamps]
    index = index_audio(path.read_bytes())
    audio = AudioFormat(index.info.sample_rate if index else rate, channels if channels in LAYOUTS else 1)
    track, result = ffmpeg_track(path, number, audio), Result(container, context.codec.canonical_name)
    far = sum(abs(one - two) > tolerance for one, two in zip(times, track.frame_times, strict=False))
    if far or len(times) != len(track.frame_times):
        result.note = f", {far} of {len(times)} video frames are at other times in ffmpeg's {len(track.frame_times)}"
    for first, count in _places(track, times, audio.sample_rate, num_windows):
        for out in _windows(path, index, first, count, audio):
            result.num_windows += 1
            problem = compare_window(out, first, track, audio, tolerance, result)
            if problem:
                result.problems.append(f"{count} samples at {first / audio.sample_rate:.4f} s: {problem}")
    return result


def _places(track: Track, times: Sequence[Fraction], rate: int, num_windows: int) -> Iterator[tuple[int, int]]:
    """Yield (first sample, number of samples) for the whole track and for windows at random frames."""
    if track.frames:
        first, last = (round(track.frames[place][0] * rate) for place in (0, -1))
        yield first - rate // 4, min(_MAX_TRACK_SECONDS * rate, last - first + rate)
    rng = np.random.default_rng(0)
    for _ in range(num_windows):
        yield first_sample_at(times[int(rng.integers(len(times)))], rate), int(rng.integers(rate // 4, rate * 2))


def _windows(path: Path, index: AudioIndex | None, first: int, count: int, audio: AudioFormat) -> Iterator[Samples]:
    out = np.full((audio.num_channels, count), np.nan, np.float32)
    decode_audio_file(path, first, out, audio)
    yield out
    if index is not None:
        out = np.full((audio.num_channels, count), np.nan, np.float32)
        window = index.window(first, count, audio.sample_rate)
        data = path.read_bytes()[window.first_byte : window.first_byte + window.num_bytes]
        decode_audio_packets(index.info, window.packets, memoryview(data), first, out, audio)
        yield out


def compare_window(
    out: Samples, first: int, track: Track, audio: AudioFormat, tolerance: float, result: Result
) -> str | None:
    """Return a description of the error in a window, or None if the window is right."""
    rate, count = audio.sample_rate, out.shape[1]
    heard, reach = np.zeros(count, np.bool_), max(1, round(tolerance * rate))
    likely, shifts = 0, list[int]()
    far = round(_JITTER_SECONDS.get(result.codec, 0.01) * rate)
    for (time, samples), (following, _) in zip(
        track.frames, [*track.frames[1:], (Fraction(1 << 40), None)], strict=True
    ):
        place = round(time * rate) - first
        heard[max(0, place - far) : max(0, place + samples.shape[1] + far)] = True
        size = min(samples.shape[1], round(following * rate) - first - place)  # later samples replace earlier ones
        if place < far or place + size + far > count or size < 1:
            continue
        found = _find(out, place, samples[:, :size], reach, likely, result.codec) or _find(
            out, place, samples[:, :size], far, likely, ""
        )
        result.num_frames += 1
        if found is None:
            return f"the frame at {float(time):.4f} s is not found"
        likely = found[0]
        shifts.append(found[0])
        result.num_equal += found[1]
    result.num_jittered += sum(abs(shift) > reach for shift in shifts)
    if shifts and abs(median := statistics.median_low(shifts)) > reach:
        return f"it is {median / rate * 1000:+.2f} ms off"
    result.largest_shift = max([result.largest_shift, *(abs(shift) / rate for shift in shifts if abs(shift) <= reach)])
    return None if not np.abs(out[:, ~heard]).max(initial=0) else "it is not silent where ffmpeg has no audio"


def _find(out: Samples, place: int, samples: Samples, reach: int, likely: int, codec: str) -> tuple[int, bool] | None:
    """Return (offset of a frame in samples, True if its samples are equal), or None if the frame is not found."""
    size = samples.shape[1]
    shifts = sorted(range(-reach, reach + 1), key=lambda shift: (shift != likely, abs(shift)))
    for shift in shifts:
        if np.abs(out[:, place + shift : place + shift + size] - samples).max(initial=0) <= _EQUAL:
            return shift, True
    if codec not in _NOISY:
        return None
    best = max(shifts, key=lambda shift: _correlation(out[:, place + shift : place + shift + size], samples))
    found = out[:, place + best : place + best + size]
    if _correlation(found, samples) >= _ALIKE:
        return best, False
    levels = [float(np.square(one).mean()) + _QUIET**2 for one in (found, samples)]
    return (likely, False) if abs(10 * np.log10(levels[0] / levels[1])) <= _LEVEL_DB else None


def _correlation(one: Samples, two: Samples) -> float:
    powers = float(np.square(one).sum()), float(np.square(two).sum())
    return float((one * two).sum()) / max(1e-12, math.sqrt(powers[0] * powers[1]))


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the videos among the given files and in the given folders."""
    found = [path for given in paths for path in ([given] if given.is_file() else sorted(given.rglob("*")))]
    return [path for path in found if path.is_file() and path.suffix.lower() in ENDINGS]


def main() -> int:
    """Compare all files, and print one line per file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="video files, or folders with video files")
    parser.add_argument("--windows", type=int, default=10, help="number of windows per file and decoding method")
    parser.add_argument("--tolerance", type=float, default=0.001, help="largest allowed time difference in seconds")
    options: Any = parser.parse_args()
    results = list[Result]()
    for path in files_of(options.paths):
        try:
            result = compare_file(path, options.windows, options.tolerance)
        except (StreamvidError, subprocess.CalledProcessError, OSError) as error:
            print(f"{path}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        if result is None:
            continue
        results.append(result)
        print(
            f"{path}: {result.container}, {result.codec}: {result.num_windows} windows, {len(result.problems)} "
            f"wrong, at most {result.largest_shift * 1000:.3f} ms off, {result.num_equal}/{result.num_frames} equal, "
            f"{result.num_jittered} fluctuate{result.note}"
        )
        print("".join(f"    {problem}\n" for problem in result.problems[:3]), end="", flush=True)
    wrong = sum(len(result.problems) for result in results)
    print(f"{len(results)} files, {sum(result.num_windows for result in results)} windows, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
