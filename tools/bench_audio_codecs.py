"""Size, fidelity and CPU time of the audio codecs of native clips: python -m tools.bench_audio_codecs FILE...

At most 10 s of each file's audio are mixed to stereo at 48 kHz, and encoded at several bit rates with the options of
native clips. "spectrum" is the RMS of the level differences in third-octave bands from 50 Hz to 16 kHz, in decibels.
Silent files are omitted. CPU times are the lowest of three runs, in milliseconds per second of audio.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from streamvid.video.audio.file import decode_audio_file
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.encode.audio import as_integers
from streamvid.video.encode.audio_profiles import AUDIO_PROFILES

RATE, SECONDS = 48_000, 10
FORMAT = AudioFormat(RATE, 2)
#: Encoder and bit rate in kbit/s; 0 for lossless.
CODECS = (("libopus", 96), ("libopus", 144), ("libopus", 176), ("aac", 128), ("aac", 192), ("aac", 256), ("flac", 0))
Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Measure:
    """Measurements of one file in one codec."""

    kbits: float
    noise_db: float
    spectrum_db: float
    decode_ms: float
    encode_ms: float


def sound_of(path: Path) -> Samples:
    """Return up to SECONDS of the audio of a video."""
    out = np.zeros((2, RATE * SECONDS), np.float32)
    result = decode_audio_file(path, 0, out, FORMAT)
    return out[:, : result.num_present]


def encoded(sound: Samples, encoder: str, kbits: int) -> bytes:
    """Encode the audio as an MP4 file."""
    sink = io.BytesIO()
    with av.open(sink, "w", format="mp4", options={"avoid_negative_ts": "disabled"}) as container:
        options = next(dict(profile.options) for profile in AUDIO_PROFILES.values() if profile.encoder == encoder)
        stream: Any = container.add_stream(encoder, rate=RATE, options=options)
        stream.layout = "stereo"
        if kbits:
            stream.bit_rate = kbits * 1000
        for at in range(0, sound.shape[1], 1024):
            part = sound[:, at : at + 1024]
            values: NDArray[Any] = as_integers(part).T.reshape(1, -1) if encoder == "flac" else part
            kind = "s16" if encoder == "flac" else "fltp"
            planes: Any = np.ascontiguousarray(values)
            frame = av.AudioFrame.from_ndarray(planes, format=kind, layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = RATE, at, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return sink.getvalue()


def decoded(data: bytes, num_samples: int) -> Samples:
    """Decode the audio of a file without pictures, with every sample at its time."""
    out = np.zeros((2, num_samples), np.float32)
    with av.open(io.BytesIO(data), "r") as container:
        container.streams.audio[0].codec_context.thread_count = 1
        for frame in container.decode(audio=0):
            values = frame.to_ndarray().reshape((2, -1) if frame.format.is_planar else (-1, 2))
            part = values if frame.format.is_planar else values.T
            room = out[:, frame.pts or 0 :][:, : frame.samples]
            room[:] = part[:, : room.shape[1]] / (1 << 15 if part.dtype == np.int16 else 1)
    return out


def bands(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the energy in each third-octave band, measured over overlapping windows of 2048 samples."""
    starts = np.arange(0, len(samples) - 2048, 512)[:, None] + np.arange(2048)
    spectra = np.abs(np.fft.rfft(samples[starts] * np.hanning(2048), axis=1)) ** 2
    numbers = np.digitize(np.fft.rfftfreq(2048, 1 / RATE), 50 * 2 ** (np.arange(26) / 3))
    found = [spectra[:, numbers == one].sum(axis=1) for one in range(1, 26) if (numbers == one).any()]
    return np.array(found)


def spectrum_difference(before: Samples, after: Samples) -> float:
    """Return the RMS of the level differences of the louder bands, in decibels."""
    found = []
    for first, second in zip(before, after, strict=True):
        energies, others = bands(first), bands(second)
        is_loud = energies > 1e-7 * energies.max()
        levels = 10 * np.log10((others[is_loud] + 1e-9) / (energies[is_loud] + 1e-9))
        found.append(float(np.sqrt(np.square(levels).mean())))
    return statistics.mean(found)


def measured(sound: Samples, encoder: str, kbits: int) -> Measure:
    """Encode and decode the audio of one file, and return the measurements."""
    seconds = sound.shape[1] / RATE
    begin = time.process_time()
    data = encoded(sound, encoder, kbits)
    encode_ms = 1000 * (time.process_time() - begin) / seconds
    spent = []
    for _ in range(3):
        begin = time.process_time()
        found = decoded(data, sound.shape[1])
        spent.append(1000 * (time.process_time() - begin) / seconds)
    error = float(np.square(found - sound).sum()) or 1e-12
    noise_db = 10 * float(np.log10(np.square(sound).sum() / error))
    return Measure(len(data) * 8 / 1000 / seconds, noise_db, spectrum_difference(sound, found), min(spent), encode_ms)


def rows(sounds: Sequence[Samples]) -> Iterator[str]:
    """Yield one output line per codec."""
    for encoder, kbits in CODECS:
        found = [measured(sound, encoder, kbits) for sound in sounds]
        mean = {name: statistics.mean(getattr(one, name) for one in found) for name in Measure.__dataclass_fields__}
        noise = statistics.median(one.noise_db for one in found)
        yield (
            f"{encoder:8} {kbits or '-':>4}: {mean['kbits']:4.0f} kbit/s, spectrum {mean['spectrum_db']:.2f} dB, "
            f"signal to noise {noise:.0f} dB, decoding {mean['decode_ms']:.2f} ms, encoding {mean['encode_ms']:.1f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    sounds = [sound for path in parser.parse_args().files if np.abs(sound := sound_of(path)).max(initial=0) > 1e-3]
    print(f"{len(sounds)} files with audio")
    for row in rows(sounds):
        print(row, flush=True)


if __name__ == "__main__":
    main()
