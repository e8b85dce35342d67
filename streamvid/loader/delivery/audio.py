"""Audio in a loader: which options it can be combined with, and how many audio samples each bucket's clips have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from streamvid.buckets.audio.rule import EXACT
from streamvid.buckets.bucket import TICKS_PER_SECOND, Bucket
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError
from streamvid.loader.mix import Mix, MixPart
from streamvid.loader.view.audio import HAS_AUDIO, AudioForm, AudioOptions, AudioPlan, AudioShape
from streamvid.loader.view.view import ViewOptions

_EXACT_RULES = ("resample", "fix_frame_rate")
_MAX_DENOMINATOR = 1001
DEFAULT_AUDIO = AudioOptions(sample_rate=48_000, num_channels=2)
"""Audio of datasets that contain only audio, unless output.audio is set."""
_NEAR = Fraction(1, 2002)  # half the difference of 24 and 24000/1001


def with_audio_plan(mix: Mix, options: AudioOptions | None, view: ViewOptions, *, is_decoded: bool) -> Mix:
    """Return the mix with an audio plan for its clips.

    is_decoded: see OutputOptions.decode.
    Raises ConfigError if the audio cannot be combined with the other options, or does not fit the datasets.
    """
    if options is None:
        options = _default(mix) if is_decoded else None
    if options is None:
        return mix
    _check(mix, view, options, is_decoded=is_decoded)
    _check_ticks(mix, options.fps)
    rates = {name: _rate(mix, bucket, options.fps) for name, bucket in mix.buckets.items() if not bucket.is_text}
    known = [rate for rate in rates.values() if rate is not None]
    if not known:
        raise ConfigError(
            "output.audio: the number of audio samples for an image depends on a frame rate, but the loader "
            "delivers only images; set output.audio.fps, or leave output.audio out"
        )
    form, shapes = options.form, dict[str, AudioShape]()
    for name, rate in rates.items():
        fps, num_frames = rate or known[0], mix.buckets[name].num_frames
        count = _num_samples(form, mix.buckets[name], fps)
        shapes[name] = AudioShape(form.sample_rate, form.num_channels, count, num_frames, fps, options.stretch)
    plan = AudioPlan(form, shapes)
    parts = (part if part.dataset.manifest.clips == "text" else replace(part, audio=plan) for part in mix.parts)
    return replace(mix, parts=tuple(parts))


def _default(mix: Mix) -> AudioOptions | None:
    """Return the default audio options if all datasets contain only audio, or None if no dataset does.

    Raises ConfigError if some datasets contain only audio and others do not, because audio options are then required.
    """
    heard = [part for part in mix.parts if part.dataset.manifest.clips == "audio" and part.sidecar is None]
    if len(heard) == len(mix.parts):
        return DEFAULT_AUDIO
    if heard:
        raise ConfigError(
            f"output.audio is not set, but {heard[0].dataset.url} contains only audio and is mixed with other "
            "datasets; set output.audio, for example output={'audio': {'sample_rate': 16000, 'num_channels': 1}}"
        )
    names = [medium.name for medium in mix.parts[0].media if medium.is_audio]
    if names:
        raise ConfigError(
            f"media={names!r}: audio inputs are delivered in the format of output.audio, which is not set; set "
            "output.audio, such as output={'audio': {'sample_rate': 16000, 'num_channels': 1}}, or omit these "
            "inputs from media"
        )
    return None


def _check(mix: Mix, view: ViewOptions, options: AudioOptions, *, is_decoded: bool) -> None:
    if any(part.sidecar is not None for part in mix.parts):
        raise ConfigError(
            "output.audio cannot be combined with features, which do not include the clips' audio; omit one of them"
        )
    if not is_decoded:
        raise ConfigError(
            "output.audio cannot be combined with output.decode=False, which delivers clips without decoding them; "
            "omit one of them"
        )
    pictured = [part for part in mix.parts if part.dataset.manifest.clips != "text"]
    if not pictured:
        raise ConfigError("output.audio: the datasets contain only text, which has no audio; leave output.audio out")
    if not options.stretch:
        _check_view(pictured, view)
    for part in pictured:
        _check_columns(part.dataset)


def _check_view(parts: list[MixPart], view: ViewOptions) -> None:
    """Raise ConfigError if a view changes the video's playback speed, so that it would no longer match the audio."""
    named = f"view.temporal={view.temporal!r}"
    is_capped = view.temporal == "opensora" and any(part.rate.rule == "cap" for part in parts)
    if view.max_interval > 1:
        named = f"view.max_interval={view.max_interval}"
    elif view.temporal != "uniform" and not is_capped:
        return
    raise ConfigError(
        f"output.audio cannot be combined with {named}, which changes the playback speed of the video; use "
        "view.temporal='random', 'head', 'middle', 'chunk' or 'full' without view.max_interval, set "
        "output.audio.stretch=True to stretch the audio too, or leave output.audio out. To deliver another frame "
        "rate at the same speed, shard the dataset with --fps"
    )


def _check_columns(dataset: Dataset) -> None:
    if HAS_AUDIO not in dataset.samples_schema.names:
        raise ConfigError(
            f"output.audio: {dataset.url} was sharded by a version of streamvid that did not record audio; shard it "
            "again, or leave output.audio out"
        )


def _check_ticks(mix: Mix, given: Fraction | None) -> None:
    """Raise ConfigError if all datasets contain only audio and output.audio.fps differs from TICKS_PER_SECOND."""
    if given in (None, TICKS_PER_SECOND) or not all(bucket.is_audio for bucket in mix.buckets.values()):
        return
    raise ConfigError(
        f"output.audio.fps={given}: must be {TICKS_PER_SECOND}, because the datasets contain only audio files, whose "
        f"buckets have {TICKS_PER_SECOND} ticks per second; leave output.audio.fps out"
    )


def _num_samples(form: AudioForm, bucket: Bucket, fps: Fraction) -> int:
    """Return the number of audio samples for a bucket.

    Raises ConfigError if the rule's nearest count differs from the exact count by more than half the exact count.
    Images are exempt: they have no duration, and a model may need at least one audio latent for them.
    """
    count = form.rule.num_samples(bucket.num_frames, fps, form.sample_rate)
    exact = bucket.num_frames / fps * form.sample_rate
    seconds, rule = float(bucket.num_frames / fps), str(form.rule)
    if not bucket.is_image and abs(count - exact) > exact / 2:
        raise ConfigError(
            f"output.audio.rule={rule!r}: bucket {bucket.id} lasts {seconds:.6g} s, which is {float(exact):.6g} audio "
            f"samples at {form.sample_rate} Hz, but the nearest number that the rule allows is {count}; the two "
            f"numbers may differ by at most half of the exact number; use {EXACT!r} or a rule with smaller steps, or "
            "deliver only longer buckets"
        )
    return count


def _rate(mix: Mix, bucket: Bucket, given: Fraction | None) -> Fraction | None:
    """Return the rate at which a bucket's frames are delivered, or None if the bucket contains only images.

    given: AudioOptions.fps. Audio files always use TICKS_PER_SECOND instead.
    Raises ConfigError if datasets are read at different rates.
    """
    if bucket.is_audio:
        return Fraction(TICKS_PER_SECOND)
    found = {fps: part for part, fps in _exact_rates(mix, bucket)}
    if given is not None:
        found.setdefault(given, mix.parts[0])
    first = next(iter(found), None)
    if first is None:
        return _first_rate(mix, bucket)
    for fps, part in found.items():
        if abs(fps / first - 1) * bucket.num_frames > Fraction(1, 2):
            where = "output.audio.fps" if fps == given else part.dataset.url
            raise ConfigError(
                f"output.audio: the frame rates for bucket {bucket.id} differ ({float(first):.6g} fps, and "
                f"{float(fps):.6g} fps according to {where}), so its clips would need different numbers of audio "
                "samples; shard the datasets with the same --fps, or use a separate loader for each dataset"
            )
    return first


def _exact_rates(mix: Mix, bucket: Bucket) -> Iterator[tuple[MixPart, Fraction]]:
    for part in mix.parts:
        rate = part.dataset.manifest.frame_rate  # native clips were resampled when they were encoded
        if bucket.id in part.subset.shards and rate.rule in _EXACT_RULES and rate.fps is not None:
            yield part, rate.fps


def _first_rate(mix: Mix, bucket: Bucket) -> Fraction | None:
    """Return the frame rate of a bucket's first video in plan order, or None if the rate is unknown.

    Samples with a different rate are rejected when they are delivered.
    """
    for part in mix.parts:
        if bucket.id in part.subset.shards:
            fps = _fps_of_first(part, bucket)
            if fps is not None and 0 < fps < math.inf:
                return _usual(fps) / part.rate.interval(fps)
    return None


def _usual(fps: float) -> Fraction:
    """Return the standard frame rate near a measured average rate, or the average rate if no standard rate is near.

    Matroska rounds timestamps to milliseconds, so the average rate of a 24 fps clip can be 24.0027. With this rate,
    the number of audio samples would depend on the length of the clip.
    """
    whole, ntsc = Fraction(round(fps)), Fraction(round(fps * 1.001) * 1000, 1001)
    nearest = min(whole, ntsc, key=lambda rate: abs(rate - Fraction(fps)))
    if abs(nearest - Fraction(fps)) <= _NEAR * fps:
        return nearest
    return Fraction(fps).limit_denominator(_MAX_DENOMINATOR)


def _fps_of_first(part: MixPart, bucket: Bucket) -> float | None:
    """Return the frame rate of a bucket's first sample that passes the part's filter."""
    chosen = part.subset.filter
    names = list(dict.fromkeys(["fps", *(chosen.columns if chosen else ())]))
    table = part.dataset.samples(part.subset.shard_info(bucket.id, 0), names)
    number = 0 if chosen is None else int(chosen.matching(table)[0])
    fps: float | None = table.column("fps")[number].as_py()
    return fps
