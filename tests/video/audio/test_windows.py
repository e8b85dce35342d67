"""Tests of windows of a track: adjacent windows rebuild it, and container and packet decoding agree."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.errors import ConfigError, DecodeError
from streamvid.video.audio.file import decode_audio_file
from streamvid.video.audio.grid import AudioFormat, first_sample_at, offset_seconds
from streamvid.video.audio.index import AudioIndex, index_audio
from streamvid.video.audio.stream import AudioStreamInfo
from tests.video.audio.clips import KINDS, track
from tests.video.audio.conftest import SoundClips
from tests.video.audio.windows import from_packets, whole_track

EXACT = [name for name, kind in KINDS.items() if kind.is_exact]
#: Codecs whose output depends on where decoding starts: Opus because of its filters' memory, AAC because of its noise.
NEAR = {"libopus": 1e-6, "aac": 0.35}


def indexed(path: object) -> tuple[bytes, AudioIndex]:
    data = path.read_bytes()  # type: ignore[attr-defined]
    index = index_audio(data)
    assert index is not None
    return data, index


@pytest.mark.parametrize("kind", EXACT)
def test_lossless_audio_is_delivered_bit_for_bit(kind: str, sound: SoundClips) -> None:
    rate, source = KINDS[kind].rate, track(KINDS[kind].rate)
    data, index = indexed(sound(kind))
    np.testing.assert_array_equal(whole_track(sound(kind), AudioFormat(rate, 1), 0, len(source))[0], source)
    np.testing.assert_array_equal(from_packets(data, index, AudioFormat(rate, 1), 0, len(source))[0], source)


@settings(max_examples=12)
@given(
    kind=st.sampled_from(["pcm_s16le_mov", "pcm_s16le_mkv", "flac_mkv", "alac_mp4"]),
    rate=st.sampled_from([8000, 16000, 22050, 32000, 44100, 48000, 96000]) | st.integers(4000, 50000),
    edges=st.lists(st.integers(-2000, 230_000), min_size=1, max_size=4, unique=True),
    channels=st.sampled_from([1, 2]),
)
def test_adjacent_windows_rebuild_the_track_exactly(
    kind: str, rate: int, edges: list[int], channels: int, sound: SoundClips
) -> None:
    """This holds for any rate, size and split; times before and after the audio are silent."""
    data, index = indexed(sound(kind))
    audio = AudioFormat(rate, channels)
    # In samples of the chosen rate, so that windows at low rates are short.
    places = sorted({-2000 * rate // 48000, 230_000 * rate // 48000, *(edge * rate // 48000 for edge in edges)})
    whole = whole_track(sound(kind), audio, places[0], places[-1] - places[0])
    parts = [from_packets(data, index, audio, first, stop - first) for first, stop in pairwise(places)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    assert np.abs(whole).max() > 0.1


@pytest.mark.parametrize("kind", [name for name in KINDS if name not in EXACT])
def test_windows_of_lossy_audio_equal_the_track(kind: str, sound: SoundClips) -> None:
    data, rng = sound(kind, 0.0).read_bytes(), np.random.default_rng(0)
    index = index_audio(data)
    if index is None:
        assert KINDS[kind].ending in ("ts", "ogv", "mpg", "wmv")
        return
    codec = kind.split("_", maxsplit=1)[0]
    for rate in (KINDS[kind].rate, 16000):
        audio = AudioFormat(rate, 2)
        whole = whole_track(sound(kind), audio, -rate, 6 * rate)
        for _ in range(4):
            count = int(rng.integers(1, 2 * rate))
            first = int(rng.integers(-rate, 5 * rate - count))
            part = from_packets(data, index, audio, first, count)
            expected = whole[:, first + rate : first + rate + count]
            if codec in NEAR and kind != "aac_mp4":
                np.testing.assert_allclose(part, expected, rtol=0, atol=NEAR[codec])
            else:
                np.testing.assert_array_equal(part, expected)


def test_opus_without_prediction_needs_little_before_a_window(sound: SoundClips) -> None:
    """The index measures the pre-roll, because no container says how the packets were encoded."""
    usual = indexed(sound.copied("flac_mkv", "-c:a libopus"))[1]
    path = sound.copied("flac_mkv", "-c:a libopus -frame_duration 60 -packet_loss 100")
    data, index = indexed(path)
    for known, most in ((index, 0.18), (usual, 0.9)):
        window = known.window(3 * 48000, 48000, 48000)
        assert most - 0.1 < (3 * 48000 - window.packets[0, 0]) / 48000 <= most
    audio = AudioFormat(48000, 2)
    whole = whole_track(path, audio, 0, 4 * 48000)
    for first in range(4801, 3 * 48000, 7777):
        part = from_packets(data, index, audio, first, 9600)
        np.testing.assert_allclose(part, whole[:, first : first + 9600], rtol=0, atol=NEAR["libopus"])


def test_a_window_refers_only_to_the_bytes_that_it_needs(sound: SoundClips) -> None:
    data, index = indexed(sound("aac_mp4"))
    window = index.window(48000, 24000, 48000)
    assert 0 < window.num_bytes < len(data) / 3
    assert window.packets[:, 4].sum() >= 24000
    covered = [(begin, end) for begin, end, _ in window.pieces]
    for _, offset, size, *_ in window.packets.tolist():
        assert any(begin <= offset and offset + size <= end for begin, end in covered)


def test_parts_without_audio_are_silent(sound: SoundClips) -> None:
    audio = AudioFormat(48000, 2)
    data, index = indexed(sound("aac_mp4"))
    assert not whole_track(sound("aac_mp4"), audio, 10 * 48000, 100).any()
    assert not from_packets(data, index, audio, 10 * 48000, 100).any()
    out = np.ones((2, 100), np.float32)
    result = decode_audio_file(sound("aac_mp4"), -50, out, audio)
    assert (result.is_present, result.num_present) == (True, 50)
    assert not decode_audio_file(sound("aac_mp4"), -500, out, audio).is_present
    silent = sound.copied("aac_mp4", "-an")
    out[:] = 1
    assert not decode_audio_file(silent, 0, out, audio).is_present
    assert not out.any()
    assert index_audio(silent.read_bytes()) is None


def test_grid_positions_are_rounded_by_at_most_half_a_sample() -> None:
    assert first_sample_at(Fraction(1, 2) / 48000, 48000) == 1
    assert first_sample_at(Fraction(-1, 2) / 48000, 48000) == 0
    for frame in range(100):
        time = Fraction(frame * 1001, 24000)
        first = first_sample_at(time, 44100)
        assert abs(offset_seconds(time, first, 44100)) <= 0.5 / 44100


def test_an_index_round_trips_through_its_stored_form_and_invalid_ones_are_refused(sound: SoundClips) -> None:
    _, index = indexed(sound("flac_mkv"))
    assert AudioStreamInfo.from_json(index.info.to_json()) == index.info
    preroll = index.info.to_json().replace('"preroll": null', '"preroll": -1')
    for text in ("", "{}", "[1]", index.info.to_json().replace("48000", "480000000"), "null", preroll):
        with pytest.raises(DecodeError):
            AudioStreamInfo.from_json(text)
    columns = (index.positions, index.offsets, index.sizes, index.heads, index.counts)
    with pytest.raises(DecodeError):
        AudioIndex(index.info, *(column[:-1] for column in columns[:1]), *columns[1:], index.checksums)
    with pytest.raises(DecodeError):
        AudioIndex(index.info, *columns, index.checksums[:-1])


def test_wrong_arguments_are_refused(sound: SoundClips) -> None:
    for rate, channels in ((0, 2), (10**7, 2), (48000, 3)):
        with pytest.raises(ConfigError):
            AudioFormat(rate, channels)
    for out in (np.zeros((1, 10), np.float32), np.zeros((2, 0), np.float32), np.zeros((2, 10))):
        with pytest.raises(ConfigError):
            decode_audio_file(sound("aac_mp4"), 0, out, AudioFormat(48000, 2))
