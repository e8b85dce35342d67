"""Tests of facts about audio, against known tracks and the ffmpeg program."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from streamvid.video.audio.index import index_audio
from streamvid.video.survey.audio_facts import AudioFacts, index_with_facts, read_audio_facts
from streamvid.video.survey.loudness import LoudnessMeter
from tests.clips import real_clip
from tests.video.audio.conftest import SoundClips
from tests.video.clips import FFMPEG, run_ffmpeg

RATE = 48000


def facts_of(path: Path) -> AudioFacts:
    found = read_audio_facts(path)
    assert found is not None
    return found


def video_with(samples: np.ndarray[tuple[int], np.dtype[np.float64]], path: Path, *options: str) -> Path:
    """Make a 2-second MOV file with this mono track."""
    sound = path.with_suffix(".raw")
    sound.write_bytes((samples * 32767).round().astype("<i2").tobytes())
    run_ffmpeg(
        *("-f", "lavfi", "-i", "color=s=64x64:r=25:d=2", "-f", "s16le", "-ar", RATE, "-ac", 1, "-i", sound),
        *("-c:v", "libx264", "-c:a", "pcm_s16le", *options, path),
    )
    return path


def test_facts_of_a_known_track(tmp_path: Path) -> None:
    tone = np.sin(np.arange(2 * RATE) * 2 * np.pi * 997 / RATE)
    tone[: RATE // 2] = 0  # a quarter is silent
    tone[RATE : RATE + 4800] = np.sign(tone[RATE : RATE + 4800])  # a twentieth is clipped
    facts = facts_of(video_with(tone * 0.999985, tmp_path / "a.mov"))
    assert (facts.codec, facts.sample_rate, facts.num_channels) == ("pcm_s16le", RATE, 1)
    assert (facts.start_seconds, facts.end_seconds, facts.duration_seconds) == (0, 0, 2)
    assert facts.gap_seconds == 0
    assert facts.silence_share == pytest.approx(0.25)
    assert facts.clipping_share == pytest.approx(0.05, rel=0.3)


def test_a_silent_track_has_no_loudness(tmp_path: Path) -> None:
    facts = facts_of(video_with(np.zeros(2 * RATE), tmp_path / "a.mov"))
    assert (facts.silence_share, facts.clipping_share, facts.loudness_lufs) == (1, 0, None)


def test_offsets_and_gaps_are_seconds(sound: SoundClips) -> None:
    late = facts_of(sound("pcm_s16le_mov", 1.237))
    assert late.start_seconds == pytest.approx(1.237, abs=1e-3)
    assert late.end_seconds == pytest.approx(1.237, abs=1e-3)
    early = facts_of(sound("pcm_s16le_mkv", -0.731))
    assert early.start_seconds == pytest.approx(-0.731, abs=1e-3)
    torn = facts_of(sound.copied("flac_mkv", "-bsf:a noise=amount=0:drop='between(n,15,20)'"))
    assert torn.gap_seconds == pytest.approx(6 * 4096 / RATE, abs=2e-3)
    assert torn.duration_seconds == pytest.approx(4, abs=2e-3)
    assert read_audio_facts(sound.copied("aac_mp4", "-an")) is None


@pytest.mark.parametrize("kind", ["aac_mp4", "libopus_webm", "ac3_ts", "real"])
def test_loudness_equals_the_ffmpeg_programs(kind: str, sound: SoundClips) -> None:
    path = Path(real_clip("bigbuckbunny")) if kind == "real" else sound(kind)
    command = [
        FFMPEG,
        "-hide_banner",
        "-nostdin",
        "-i",
        str(path),
        "-map",
        "0:a:0",
        "-af",
        "ebur128",
        "-f",
        "null",
        "-",
    ]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    expected = float(re.findall(r"I: +(-?[\d.]+) LUFS", log)[-1])
    assert facts_of(path).loudness_lufs == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(("unnamed", "named"), [("2 channels", "stereo"), ("6 channels", "5.1")])
def test_unnamed_channels_are_as_loud_as_the_default_layouts(unnamed: str, named: str) -> None:
    generator, found = np.random.default_rng(0), {}
    samples = (generator.standard_normal((int(unnamed[0]), RATE)) * 0.1).cumsum(axis=1).clip(-1, 1).astype(np.float32)
    for layout in (unnamed, named):
        meter = LoudnessMeter(RATE, layout)
        meter.add(samples)
        found[layout] = meter.finish()
    assert found[unnamed] == found[named] is not None


def test_one_pass_gives_the_index_and_the_facts(sound: SoundClips) -> None:
    for kind in ("aac_mp4", "libopus_webm", "ac3_ts"):
        data = sound(kind).read_bytes()
        index, facts = index_with_facts(data)
        alone = index_audio(data)
        assert facts == read_audio_facts(data) and (index is None) == (alone is None) == (kind == "ac3_ts")
        if index is not None and alone is not None:
            assert index.info == alone.info and np.array_equal(index.positions, alone.positions)
    assert index_with_facts(sound.copied("aac_mp4", "-an").read_bytes()) == (None, None)
