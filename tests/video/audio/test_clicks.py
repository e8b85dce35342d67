"""SAMPLE-2: in every window, a click sounds where the ffmpeg program puts it relative to the same frame."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.video.audio.clips import KINDS, ffmpeg_truth
from tests.video.audio.conftest import SoundClips
from tests.video.audio.windows import Score, compare

VARIABLE_RATE = "setpts='PTS+mod(N,3)*0.011/TB'"
#: name → (kind, ffmpeg's output options of a copy, its input options)
COPIES = {
    "cut within a packet": ("aac_mp4", "", "-ss 0.313"),
    "cut, start before zero": ("aac_mp4", "-copyts -avoid_negative_ts disabled", "-ss 0.9"),
    "cut PCM": ("pcm_s16le_mov", "", "-ss 0.313"),
    "cut ALAC": ("alac_mp4", "", "-ss 0.313"),
    "fragments": ("alac_mp4", "-movflags +frag_keyframe+empty_moov", ""),
    "no edit list": ("aac_mp4", "-use_editlist 0", ""),
    "first packets lost": ("alac_mp4", "-bsf:a noise=amount=0:drop='lt(n,7)'", ""),
    "gap in AAC": ("aac_mp4", "-bsf:a noise=amount=0:drop='between(n,30,47)'", ""),
    "gap in FLAC": ("flac_mkv", "-bsf:a noise=amount=0:drop='between(n,15,20)'", ""),
    "gap in PCM": ("pcm_s16le_mkv", "-bsf:a noise=amount=0:drop='between(n,30,47)'", ""),
    "gap in a transport stream": ("mp2_ts", "-bsf:a noise=amount=0:drop='between(n,30,47)'", ""),
    "gap in Opus": ("libopus_webm", "-bsf:a noise=amount=0:drop='between(n,30,47)'", ""),
    "step of 3 ms": ("alac_mp4", "-bsf:a setts=ts='PTS+if(gte(N,20),0.003/TB,0)'", ""),
    "overlap": ("alac_mp4", "-bsf:a setts=ts='PTS-if(gte(N,20),0.0371/TB,0)'", ""),
    "overlap in Opus": ("libopus_mp4", "-bsf:a setts=ts='PTS-if(gte(N,40),0.0371/TB,0)'", ""),
    "first packet early": ("aac_mkv", "-bsf:a setts=ts='PTS-eq(N,1)'", ""),
    "timestamps wrap": ("ac3_ts", "-output_ts_offset 95441.5 -muxdelay 0", ""),
}


def check(path: Path, kind: str, num_windows: int, seed: int = 0) -> Score:
    score = Score()
    truth = ffmpeg_truth(path)
    assert truth.click_times
    compare(path, truth, score, num_windows, 0 if KINDS[kind].is_exact else 1e-3, seed)
    assert not score.wrong, "\n".join(score.wrong)
    return score


@pytest.mark.parametrize("kind", KINDS)
def test_clicks_of_every_container_and_codec(kind: str, sound: SoundClips) -> None:
    offset = (0.0, 1.237, -0.731, 5.0, -2.5)[list(KINDS).index(kind) % 5]
    assert check(sound(kind, offset), kind, 4).num_windows >= 4


@pytest.mark.parametrize("name", COPIES)
def test_clicks_after_cuts_gaps_overlaps_and_wraps(name: str, sound: SoundClips) -> None:
    kind, options, before = COPIES[name]
    check(sound.copied(kind, options, before=before), kind, 4)


def test_clicks_of_videos_with_a_variable_frame_rate(sound: SoundClips) -> None:
    for kind in ("pcm_s16le_mkv", "aac_mp4"):
        check(sound(kind, 0.0, VARIABLE_RATE), kind, 4)


def test_clips_are_made_with_each_click_at_its_white_frame(sound: SoundClips) -> None:
    """Checks the test clips: in the ffmpeg program's output, each white frame and its click have the same time."""
    for kind in ("pcm_s16le_mov", "aac_mp4", "flac_mkv", "ac3_ts"):
        truth = ffmpeg_truth(sound(kind))
        assert len(truth.flash_times) == len(truth.click_times) == 4
        assert truth.click_times == pytest.approx(truth.flash_times, abs=5e-4)
        late = ffmpeg_truth(sound(kind, 1.237))
        assert late.click_times == pytest.approx([time + 1.237 for time in late.flash_times], abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_windows_are_right(sound: SoundClips) -> None:
    total = Score()
    for offset in (-5.0, -2.5, -0.731, 0.0, 0.0123, 1.237, 5.0):
        for number, kind in enumerate(KINDS):
            if KINDS[kind].ending == "ogv" and offset < -1:
                continue  # Ogg has no negative times: ffmpeg writes a file that it misplaces or cannot read
            truth = ffmpeg_truth(sound(kind, offset))
            compare(sound(kind, offset), truth, total, 8, 0 if KINDS[kind].is_exact else 1e-3, number)
    for number, (kind, options, before) in enumerate(COPIES.values()):
        path = sound.copied(kind, options, before=before)
        compare(path, ffmpeg_truth(path), total, 30, 0 if KINDS[kind].is_exact else 1e-3, number)
    for kind in KINDS:
        path = sound(kind, 0.0, VARIABLE_RATE)
        compare(path, ffmpeg_truth(path), total, 8, 0 if KINDS[kind].is_exact else 1e-3, 1)
    assert not total.wrong, f"{len(total.wrong)} of {total.num_windows}:\n" + "\n".join(total.wrong)
    print(f"{total.num_windows} windows, {total.num_clicks} clicks, 0 wrong")
    assert total.num_windows >= 2000
    assert total.num_clicks >= 1000
