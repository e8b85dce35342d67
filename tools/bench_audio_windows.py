"""CPU time and accuracy of decoding windows of audio with streamvid and, if installed, with torchcodec's AudioDecoder.

    python -m tools.bench_audio_windows [--seconds 2] [--windows 10] [--repeats 5] FILE...   (from the root)

To include torchcodec, use the Python of the peers' environment (`make peers`), and set LD_LIBRARY_PATH=.peers/ffmpeg.
Files are in memory, decoders have one thread, and the audio keeps the rate and channels of the stream. All methods
decode the same windows in random order. Each window starts at the time of a random frame. The results for each file
are:

- CPU milliseconds per window, as medians over the repeats. "packets" decodes from the byte range of the window, using
  an existing packet index, as a loader does. The output also shows this range as a share of the file. "file" opens the
  container and decodes from its start. "torchcodec" creates a decoder and calls get_samples_played_in_range, while
  "torchcodec kept" reuses a decoder.
- the number of wrong windows, by the rules of tools/compare_audio.py: audio frames whose time or samples differ from
  the output of the ffmpeg program. The samples of a peer are placed at the time that the peer reports.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from streamvid.video.audio.file import decode_audio_file
from streamvid.video.audio.grid import LAYOUTS, AudioFormat, first_sample_at
from streamvid.video.audio.index import AudioIndex, index_audio
from streamvid.video.audio.stored import decode_audio_packets
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import open_video
from streamvid.video.limits import LIMITS
from streamvid.video.packets import read_packets
from tools.compare_audio import Result, Samples, compare_window, ffmpeg_track

Method = Callable[[int, int], Samples]
_TOLERANCE = 0.001


class File:
    """A file in memory, and methods that decode windows of its audio. A window is (first sample, num_samples)."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path.read_bytes()
        with open_video(path, LIMITS) as video:
            stream = audio_stream(video)
            if stream is None or stream.codec_context.layout.nb_channels not in LAYOUTS:
                raise SystemExit(f"{path}: no audio in mono, stereo, 5.1 or 7.1")
            self.codec = stream.codec_context.codec.canonical_name
            self.stream = stream.index
            self.audio = AudioFormat(stream.codec_context.sample_rate, stream.codec_context.layout.nb_channels)
            table = read_packets(video)
            self.times = [moment * table.time_base for moment in table.timestamps]
        self.index: AudioIndex | None = index_audio(self.data)
        self.methods: dict[str, Method] = {"file": self.from_file}
        if self.index is not None:
            self.methods = {"packets": self.from_packets, **self.methods}
        if importlib.util.find_spec("torchcodec"):
            from torchcodec.decoders import AudioDecoder

            kept = AudioDecoder(self.data)
            self.methods["torchcodec"] = lambda first, count: self.played(AudioDecoder(self.data), first, count)
            self.methods["torchcodec kept"] = lambda first, count: self.played(kept, first, count)

    def empty(self, count: int) -> Samples:
        return np.zeros((self.audio.num_channels, count), np.float32)

    def from_packets(self, first: int, count: int) -> Samples:
        """Decode a window from indexed packets, as a loader does."""
        assert self.index is not None
        out, window = self.empty(count), self.index.window(first, count, self.audio.sample_rate)
        part = memoryview(self.data)[window.first_byte : window.first_byte + window.num_bytes]
        decode_audio_packets(self.index.info, window.packets, part, first, out, self.audio)
        return out

    def from_file(self, first: int, count: int) -> Samples:
        """Decode a window through the container."""
        out = self.empty(count)
        decode_audio_file(self.data, first, out, self.audio)
        return out

    def played(self, decoder: Any, first: int, count: int) -> Samples:
        """Decode a window with torchcodec. Samples that it does not return are zero."""
        rate, out = self.audio.sample_rate, self.empty(count)
        try:
            found = decoder.get_samples_played_in_range(max(0.0, first / rate), (first + count) / rate)
        except RuntimeError as error:  # a window without audio raises
            if "No audio frames" in str(error):
                return out
            raise
        place = round(found.pts_seconds * rate) - first
        samples = found.data.numpy()[:, max(0, -place) :][:, : count - max(0, place)]
        out[:, max(0, place) : max(0, place) + samples.shape[1]] = samples
        return out

    def share(self, windows: list[tuple[int, int]]) -> float:
        """Return the mean share of the file's bytes that must be read to decode a window from packets."""
        if self.index is None:
            return 1.0
        sizes = [self.index.window(*window, self.audio.sample_rate).num_bytes for window in windows]
        return statistics.mean(sizes) / len(self.data)


def measure(file: File, windows: list[tuple[int, int]], repeats: int) -> dict[str, float]:
    """Return the CPU milliseconds per window of each method."""
    spent: dict[str, list[float]] = {name: [] for name in file.methods}
    for repeat in range(repeats + 1):
        for name in random.Random(repeat).sample(sorted(spent), len(spent)):
            begin = time.process_time()
            for window in windows:
                file.methods[name](*window)
            if repeat:  # the first one warms up
                spent[name].append(1000 * (time.process_time() - begin) / len(windows))
    return {name: statistics.median(values) for name, values in spent.items()}


def num_wrong(file: File, windows: list[tuple[int, int]]) -> dict[str, int]:
    """Return the number of wrong windows for each method. A method that raises an error counts as wrong."""
    track, wrong = ffmpeg_track(file.path, file.stream, file.audio), dict.fromkeys(file.methods, 0)
    for name, method in file.methods.items():
        for first, count in windows:
            try:
                out = method(first, count)
            except RuntimeError:
                wrong[name] += 1
                continue
            result = Result("", file.codec)
            wrong[name] += compare_window(out, first, track, file.audio, _TOLERANCE, result) is not None
    return wrong


def main() -> None:
    """Print one line per file and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window in seconds")
    parser.add_argument("--windows", type=int, default=10, help="number of windows per file")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for path in options.files:
        file, rng = File(path), random.Random(0)
        rate, count = file.audio.sample_rate, round(options.seconds * file.audio.sample_rate)
        last = file.times[-1] - Fraction(options.seconds)
        early = [moment for moment in file.times if moment <= last] or file.times[:1]
        windows = [(first_sample_at(rng.choice(early), rate), count) for _ in range(options.windows)]
        wrong, costs = num_wrong(file, windows), measure(file, windows, options.repeats)
        print(
            f"{path.name}: {file.codec}, {rate} Hz, {file.audio.num_channels} channels, {file.share(windows):.1%} read"
        )
        for name, cost in costs.items():
            print(f"    {name:16} {cost:7.2f} ms, {wrong[name]} of {len(windows)} windows wrong", flush=True)


if __name__ == "__main__":
    main()
