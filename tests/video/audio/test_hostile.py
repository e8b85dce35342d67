"""SAFE-1: tests that damaged, unusual and hostile audio gives documented errors or silence, but no crash or shift."""

from __future__ import annotations

import gc
import random
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from streamvid.errors import DecodeError, ProbeError, StreamvidError
from streamvid.video.audio.file import decode_audio_file
from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.index import index_audio
from streamvid.video.survey.audio_facts import read_audio_facts
from tests.video.audio.clips import KINDS, Float32s
from tests.video.audio.conftest import SoundClips
from tests.video.audio.windows import from_packets
from tests.video.clips import run_ffmpeg

AUDIO = AudioFormat(48000, 1)


def decoded(data: bytes, count: int = 5 * 48000) -> Float32s | None:
    """Return the first seconds, or None if decoding raises the documented error."""
    out = np.zeros((1, count), np.float32)
    try:
        decode_audio_file(data, 0, out, AUDIO)
    except DecodeError:
        return None
    assert np.isfinite(out).all()
    return out


def damage(data: bytes, way: str, rng: random.Random) -> bytes:
    bad = bytearray(data)
    if way == "cut":
        return bytes(bad[: rng.randrange(len(bad))])
    if way == "zeros":
        place = rng.randrange(len(bad))
        bad[place : place + 64] = bytes(len(bad[place : place + 64]))
    for _ in range({"bytes": 8, "header": 3}.get(way, 0)):
        bad[rng.randrange(min(2000, len(bad)) if way == "header" else len(bad))] = rng.randrange(256)
    return bytes(bad)


def run_damaged(kind: str, sound: SoundClips, num_each: int) -> None:
    good, rng = sound(kind).read_bytes(), random.Random(kind)
    for way in ("cut", "zeros", "bytes", "header"):
        for _ in range(num_each):
            bad = damage(good, way, rng)
            decoded(bad)
            for read in (index_audio, read_audio_facts):
                try:
                    read(bad)
                except ProbeError as error:
                    assert str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_raise_the_documented_errors(kind: str, sound: SoundClips) -> None:
    run_damaged(kind, sound, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_damaged_files_raise_the_documented_errors(sound: SoundClips) -> None:
    for kind in KINDS:
        run_damaged(kind, sound, 12)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1 << 20, "more than 1 GiB"


@pytest.mark.parametrize("kind", ["flac_mkv", "pcm_s16le_mov", "ac3_mp4", "eac3_mkv"])
def test_damage_that_a_codec_can_detect_never_shifts_the_audio(kind: str, sound: SoundClips) -> None:
    """Only packet bytes are damaged, not the container: decoding fails, or all other samples keep their places."""
    data = sound(kind).read_bytes()
    index, good, rng = index_audio(data), decoded(data), random.Random(1)
    assert index is not None
    assert good is not None
    for _ in range(8):
        packet = rng.randrange(len(index.offsets))
        bad = bytearray(data)
        bad[int(index.offsets[packet]) + int(index.sizes[packet]) // 2] ^= 0x55
        found = decoded(bytes(bad))
        assert (found is None) == (kind != "pcm_s16le_mov")
        if found is not None:
            assert np.count_nonzero(found != good) <= 2
        with pytest.raises((DecodeError, AssertionError)):
            np.testing.assert_array_equal(from_packets(bytes(bad), index, AUDIO, 0, 5 * 48000), good)


def test_packets_of_another_clip_are_an_error(sound: SoundClips) -> None:
    index = index_audio(sound("flac_mkv").read_bytes())
    assert index is not None
    with pytest.raises(DecodeError):
        from_packets(sound("aac_mp4").read_bytes().ljust(index.num_bytes, b"\0"), index, AUDIO, 0, 48000)


def test_a_codec_that_is_not_allowed_is_named(tmp_path: Path, sound: SoundClips) -> None:
    path = tmp_path / "a.mkv"
    run_ffmpeg("-i", sound("pcm_s16le_mkv"), "-c:v", "copy", "-c:a", "wavpack", path)
    with pytest.raises(DecodeError, match="wavpack is not allowed.*re-encode the audio"):
        decode_audio_file(path, 0, np.zeros((1, 10), np.float32), AUDIO)
    with pytest.raises(ProbeError) as caught:
        read_audio_facts(path)
    assert caught.value.kind == "codec"


@pytest.mark.parametrize("order", ["FR+FL+LFE", "FL+LFE+BL"])
def test_channels_in_an_unnamed_order_are_refused(order: str, tmp_path: Path) -> None:
    """PyAV frees the channel list of an unnamed order twice, which would crash the process."""
    path, sines = tmp_path / "a.mov", "0.1*sin(t)|0.2*sin(2*t)|0.3"
    run_ffmpeg(
        *(
            "-f",
            "lavfi",
            "-i",
            "color=s=64x64:r=25:d=1",
            "-f",
            "lavfi",
            "-i",
            f"aevalsrc={sines}:d=1:s=48000:c={order}",
        ),
        *("-c:v", "libx264", "-c:a", "pcm_s16le", path),
    )
    data = path.read_bytes()
    for _ in range(8):
        for read in (index_audio, read_audio_facts):
            with pytest.raises(ProbeError, match="channel layout"):
                read(data)
        with pytest.raises(DecodeError, match="channel layout"):
            decode_audio_file(path, 0, np.zeros((1, 10), np.float32), AUDIO)
        gc.collect()


def test_sample_rates_beyond_the_limits_are_refused(tmp_path: Path, sound: SoundClips) -> None:
    data = bytearray(sound("pcm_s16le_avi").read_bytes())
    place = data.index(struct.pack("<HHI", 1, 1, 48000))
    for rate in (0, 1, 999, 768_001, 2**31 - 1):
        data[place + 4 : place + 8] = struct.pack("<I", rate)
        with pytest.raises(StreamvidError):
            decode_audio_file(bytes(data), 0, np.zeros((1, 10), np.float32), AUDIO)


def test_an_alac_header_cannot_request_memory(sound: SoundClips) -> None:
    data = bytearray(sound("alac_mp4").read_bytes())
    place = data.rindex(b"alac") + 8
    data[place : place + 4] = struct.pack(">I", 4096 * 4096)
    with pytest.raises(DecodeError, match="samples per packet"):
        decode_audio_file(bytes(data), 0, np.zeros((1, 10), np.float32), AUDIO)


def test_timestamps_years_away_are_refused(sound: SoundClips) -> None:
    path = sound.copied("flac_mkv", "-bsf:a setts=ts='PTS+if(gte(N,20),9e14,0)'")
    with pytest.raises(ProbeError) as caught:
        read_audio_facts(path)
    assert caught.value.kind == "timestamps"


def test_a_track_whose_first_packets_are_incomplete_is_silent_there(sound: SoundClips) -> None:
    """Recordings may begin in the middle of a packet."""
    data = sound("ac3_mp4").read_bytes()
    index, good = index_audio(data), decoded(data)
    assert index is not None
    assert good is not None
    bad = bytearray(data)
    bad[int(index.offsets[0]) : int(index.offsets[0]) + 8] = bytes(8)
    found = decoded(bytes(bad))
    assert found is not None
    assert not found[0, :256].any()
    np.testing.assert_array_equal(found[0, 4096:], good[0, 4096:])
