"""Tests of Open-Sora's rule against its own results, a plain reimplementation, and the frequencies of its draws."""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamvid.buckets.bucket import Bucket
from streamvid.buckets.classes import Choices, ClipFacts
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.document import bucket_config_from_json
from streamvid.buckets.frames import FrameRate
from streamvid.buckets.geometry import resolution_name
from streamvid.buckets.opensora import OpenSoraConfig
from streamvid.buckets.policy import Policy
from streamvid.buckets.ratios import Ratios

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "opensora_golden.json").read_text())
GOLDEN_V12 = json.loads((DATA / "opensora_v12_golden.json").read_text())
Z_AT_1E_6 = 4.892  # two-sided quantile of the normal distribution

Flip = Callable[[float], bool]
"""Draw that returns True with the given probability."""


def frozen(value: Any) -> Any:
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value


@functools.cache
def golden_config(name: str, fps_max: int) -> BucketConfig:
    form = {
        resolution: {int(frames): frozen(entry) for frames, entry in entries.items()}
        for resolution, entries in GOLDEN["configs"][name]["bucket_config"].items()
    }
    rate = FrameRate("cap", Fraction(fps_max))
    return BucketConfig(opensora=OpenSoraConfig(bucket_config=form, probabilities="opensora-v2"), frame_rate=rate)


def facts_of(config: BucketConfig, num_frames: int, height: int, width: int, fps: float | None) -> ClipFacts:
    """Open-Sora treats a clip with one frame at the capped rate as an image; streamvid goes by the file type."""
    is_image = config.frame_rate.num_frames(num_frames, fps, None) == 1
    return ClipFacts(num_frames, height, width, fps, is_image=is_image)


@pytest.mark.parametrize("name", sorted(GOLDEN["configs"]))
def test_assignment_equals_opensora(name: str) -> None:
    """Covers all 2,400 results of Open-Sora's own code, with probabilities, batch sizes and draws."""
    cases = [case[1:] for case in GOLDEN["cases"] if case[0] == name]
    differing = []
    for num_frames, height, width, fps, fps_max, seed, expected in cases:
        config = golden_config(name, fps_max)
        facts = facts_of(config, num_frames, height, width, fps)
        bucket = config.walk(facts, iter(np.random.default_rng(seed).random, None))
        choices = config.choices(facts)
        if bucket is None:
            got = None
            assert choices.rest > 0
        else:
            # The suffixes _max and _ar1:1 restrict the ratios; streamvid's names omit them.
            got = [bucket.resolution, bucket.num_frames, bucket.aspect_ratio, list(bucket.shape)]
            got.append(config.batch_sizes[bucket.id])
            assert bucket in choices.buckets
        if got != (expected and [expected[0].partition("_")[0], *expected[1:]]):
            differing.append((num_frames, height, width, fps, fps_max, expected, got))
    assert len(cases) == 600
    assert differing == []


def test_assignment_equals_opensora_1_2() -> None:
    """Covers all 600 results of its own code: T + 1 frames for a bucket of T, areas, pairs, and names such as 512."""
    differing = []
    for number, form in enumerate(GOLDEN_V12["configs"]):
        config = bucket_config_from_json({"bucket_config": form, "assign": "all"})
        for _, num_frames, height, width, expected in (case for case in GOLDEN_V12["cases"] if case[0] == number):
            choices = config.choices(ClipFacts(num_frames, height, width, is_image=num_frames == 1))
            got = [[resolution_name(expected[0]), expected[1]]] if expected else []
            if [[bucket.resolution, bucket.num_frames] for bucket in choices.buckets] != got:
                differing.append((number, num_frames, height, width, expected, choices))
    assert len(GOLDEN_V12["cases"]) == 600
    assert differing == []


# ---------------------------------------------------------------- a reimplementation from the description of the rules


@functools.cache
def restated_table(pixels: int, multiple: int) -> dict[str, tuple[int, int]]:
    """Return {ratio w:h: (height, width)}, computed in floats as Open-Sora does."""
    listed: dict[str, tuple[int, int]] = {}
    reversed_: dict[str, tuple[int, int]] = {}
    for name in ("2.39:1", "2:1", "16:9", "1.85:1", "9:16", "5:8", "3:2", "4:3", "1:1"):
        w, h = (float(side) for side in name.split(":"))
        width = int(math.sqrt(pixels * (w / h)) // multiple) * multiple
        height = int(pixels / width // multiple) * multiple
        best = (height, width)
        for neighbour in (
            (height - multiple, width),
            (height + multiple, width),
            (height, width - multiple),
            (height, width + multiple),
        ):
            if abs(neighbour[0] * neighbour[1] - pixels) < abs(best[0] * best[1] - pixels):
                best = neighbour
        if best not in listed.values():
            listed[name] = best
            reversed_[":".join(reversed(name.split(":")))] = (best[1], best[0])
    return {**listed, **reversed_}


def restated_pixels(name: str) -> int:
    number = int(name.removesuffix("px").removesuffix("p"))
    return number * number if name.endswith("px") else int(number * number * 16 / 9)


def restated_sizes(name: str, multiple: int) -> tuple[int, dict[str, tuple[int, int]]]:
    resolution, _, setting = name.partition("_")
    pixels = restated_pixels(resolution)
    table = restated_table(pixels, multiple)
    if setting == "max":
        largest = max(table, key=lambda ratio: table[ratio][0] * table[ratio][1])
        return pixels, {largest: table[largest]}
    return pixels, {setting[2:]: table[setting[2:]]} if setting else table


@dataclass(frozen=True)
class Case:
    """Configuration in Open-Sora's form and a clip."""

    form: dict[str, dict[int, Any]]
    version: str
    multiple: int
    fps_max: int
    num_frames: int
    height: int
    width: int
    fps: float | None


def restated(case: Case, flip: Flip) -> tuple[str, int, int, int] | None:
    """Return (resolution, T, H, W) of Open-Sora's search, version 2 or 1.2, with draws from `flip`."""
    interval = 1 if case.fps is None or case.fps < case.fps_max else math.ceil(case.fps / case.fps_max)
    frames = case.num_frames // interval
    sized = {name: restated_sizes(name, case.multiple) for name in case.form}
    for name in sorted(case.form, key=lambda name: sized[name][0], reverse=True):
        pixels, table = sized[name]
        if case.version == "opensora-v1.2":
            pixels = {"240p": 102240, "480p": 409920}.get(name.partition("_")[0], pixels)
        if case.height * case.width < pixels * 0.8:
            continue
        count = restated_count(case.form[name], frames, case.version, flip)
        if count is not None:
            nominal = {ratio: float(ratio.split(":")[1]) / float(ratio.split(":")[0]) for ratio in table}
            nearest = min(table, key=lambda ratio: abs(case.height / case.width - nominal[ratio]))
            return (name.partition("_")[0], count, *table[nearest])
    return None


def restated_count(entries: dict[int, Any], frames: int, version: str, flip: Flip) -> int | None:
    """Return the frame count that a resolution accepts, or None if the search continues with the next resolution."""
    if frames == 1:
        return 1 if 1 in entries and flip(entries[1][0]) else None
    for count in sorted(entries, reverse=True):
        probability = entries[count][0]
        if count == 1 or count + (version == "opensora-v1.2") > frames:
            continue
        if isinstance(probability, tuple):
            probability, second = probability
            goes_on = flip(second) if version == "opensora-v2" else not flip(second)
            if goes_on:
                continue
        return count if flip(probability) else None
    return None


class Branch:
    """Draws that follow a path; beyond its end, they return True and extend it, so that False is tried later."""

    def __init__(self, path: tuple[bool, ...]) -> None:
        self.path, self.position, self.share = path, 0, Fraction(1)

    def flip(self, probability: float) -> bool:
        if self.position == len(self.path):
            self.path += (True,)
        chosen = self.path[self.position]
        self.position += 1
        share = Fraction(str(probability))
        self.share *= share if chosen else 1 - share
        return chosen


def restated_probabilities(case: Case) -> dict[tuple[str, int, int, int] | None, Fraction]:
    """Return each bucket's probability by trying every outcome of every draw."""
    found: dict[tuple[str, int, int, int] | None, Fraction] = {}
    paths: list[tuple[bool, ...]] = [()]
    while paths:
        known = paths.pop()
        branch = Branch(known)
        bucket = restated(case, branch.flip)
        paths += [(*branch.path[:place], False) for place in range(len(known), len(branch.path))]
        if branch.share:
            found[bucket] = found.get(bucket, Fraction(0)) + branch.share
    return found


# The first resolution is not used with multiple 64: there, Open-Sora's 16:9 and 9:16 sizes do not mirror each other.
RESOLUTIONS = ("240p", "144p", "256px", "360p", "480p", "512px", "768px", "720p", "1024px")
PROBABILITIES = (1.0, 1.0, 1, 0.0, 0.1, 0.33, 0.5, 0.8, 1e-3)


def drawn_cases(seed: int, num_configs: int, clips_each: int) -> Iterator[tuple[BucketConfig, Case]]:
    rng = random.Random(seed)
    for _ in range(num_configs):
        multiple, fps_max = rng.choice((8, 16, 32, 64)), rng.choice((16, 24, 30))
        version = rng.choice(("opensora-v2", "opensora-v1.2"))
        form = {}
        for name in rng.sample(RESOLUTIONS[multiple == 64 :], rng.randint(1, 3)):
            setting = rng.choice(("", "", "", "_max", "_ar2.39:1"))
            counts = rng.sample((1, 5, 8, 16, 17, 33, 51, 65, 102, 129), rng.randint(1, 4))
            form[name + setting] = {
                count: (drawn_probability(rng, count), rng.choice((1, 4, None))) for count in counts
            }
        try:
            config = BucketConfig(
                opensora=OpenSoraConfig(bucket_config=form, probabilities=version),
                ratios=Ratios(multiple),
                frame_rate=FrameRate("cap", Fraction(fps_max)),
            )
        except ValueError as error:
            assert "every probability is 0" in str(error)
            continue
        for _ in range(clips_each):
            size = rng.choice(((1080, 1920), (720, 1280), (480, 854), (1920, 1080), (240, 320), (0, 0)))
            height, width = size if size[0] else (rng.randint(100, 1400), rng.randint(100, 2400))
            fps = rng.choice((None, 10, 15, 16, 23.976, 24, 25, 29.97, 30, 50, 59.94, 60, 120))
            num_frames = rng.choice((1, 2, 4, 16, 17, 33, 51, 129)) if rng.random() < 0.4 else rng.randint(1, 400)
            yield config, Case(form, version, multiple, fps_max, num_frames, height, width, fps)


def drawn_probability(rng: random.Random, count: int) -> Any:
    if count == 1 or rng.random() < 0.6:
        return rng.choice(PROBABILITIES)
    return (rng.choice(PROBABILITIES), rng.choice((0.0, 0.1, 0.5, 1.0)))


def key_of(bucket: Bucket | None) -> tuple[str | None, int, int, int] | None:
    return None if bucket is None else (bucket.resolution, *bucket.shape)


def test_ten_thousand_random_cases_equal_a_reimplementation_of_the_rules() -> None:
    """The probabilities are exact for both versions; for version 2, the same draws also give the same bucket."""
    num_cases = 0
    kinds: Counter[str] = Counter()
    for config, case in drawn_cases(seed=6, num_configs=1050, clips_each=10):
        facts = facts_of(config, case.num_frames, case.height, case.width, case.fps)
        choices = config.choices(facts)
        kinds[choices.kind] += 1
        ours: dict[Any, Fraction] = {}
        for bucket, probability in choices.options:
            ours[key_of(bucket)] = ours.get(key_of(bucket), Fraction(0)) + probability
        if choices.rest:
            ours[None] = choices.rest
        assert ours == restated_probabilities(case), case
        if case.version == "opensora-v2":
            generator = np.random.default_rng(num_cases)
            # A draw that cannot change the result is skipped, except for images.
            flip = counted_flips(generator, case)
            walked = config.walk(facts, iter(np.random.default_rng(num_cases).random, None))
            assert key_of(walked) == restated(case, flip), case
        num_cases += 1
    assert num_cases >= 10_000
    assert {"", "probability", "too-small", "too-few-frames"} <= set(kinds)


def counted_flips(generator: np.random.Generator, case: Case) -> Flip:
    interval = 1 if case.fps is None or case.fps < case.fps_max else math.ceil(case.fps / case.fps_max)
    is_image = case.num_frames // interval == 1
    return lambda p: (p >= 1 and not is_image) or generator.random() <= p


# ---------------------------------------------------------------- draws


SEED = {"256px": {1: (0.1, 4), 16: (0.9, 2)}, "512px": {16: (1.0, 1), 32: (0.8, 1)}}
PAIRS = {"480p": {33: ((0.5, 0.25), 1), 65: ((1.0, 0.4), 1)}, "256px": {17: (0.7, 1)}}


def probabilities_of(choices: Choices) -> dict[str, Fraction]:
    return {bucket.id: probability for bucket, probability in choices.options}


def test_a_rejected_clip_goes_to_the_next_resolution_and_never_to_a_shorter_count() -> None:
    """Open-Sora checklist, row 10: 0.8 of the long clips stay at 512px; 0.9 of the others stay at 256px."""
    config = BucketConfig(opensora=OpenSoraConfig(bucket_config=SEED))
    assert probabilities_of(config.choices(ClipFacts(40, 1080, 1920))) == {
        "512px-32f-16x9": Fraction(8, 10),
        "256px-16f-16x9": Fraction(2, 10) * Fraction(9, 10),
    }
    image = config.choices(ClipFacts(1, 1080, 1920, is_image=True))
    assert probabilities_of(image) == {"256px-1f-16x9": Fraction(1, 10)}
    assert (image.kind, image.rest) == ("probability", Fraction(9, 10))


def test_a_probability_of_zero_pushes_long_clips_down() -> None:
    """Open-Sora checklist, row 8: (0.0, None)."""
    config = BucketConfig(
        opensora=OpenSoraConfig(bucket_config={"480p": {17: (1.0, 4), 65: (0.0, None)}, "256px": {17: (1.0, 8)}})
    )
    assert probabilities_of(config.choices(ClipFacts(80, 1080, 1920))) == {"256px-17f-16x9": 1}
    assert probabilities_of(config.choices(ClipFacts(64, 1080, 1920))) == {"480p-17f-16x9": 1}
    assert "480p-65f-16x9" not in {bucket.id for bucket in config.table.buckets}
    assert set(config.batch_sizes.values()) == {4, 8}


def test_pairs_have_opposite_meanings_in_the_two_versions() -> None:
    """Open-Sora checklist, row 7."""
    clip = ClipFacts(70, 1080, 1920)
    ours = {
        version: probabilities_of(
            BucketConfig(opensora=OpenSoraConfig(bucket_config=PAIRS, probabilities=version)).choices(clip)
        )
        for version in ("opensora-v2", "opensora-v1.2")
    }
    skip = {"480p-65f-16x9": Fraction(6, 10), "480p-33f-16x9": Fraction(4, 10) * Fraction(3, 4) * Fraction(1, 2)}
    stay = {"480p-65f-16x9": Fraction(4, 10), "480p-33f-16x9": Fraction(6, 10) * Fraction(1, 4) * Fraction(1, 2)}
    # With either version, all clips not kept at 480p continue to 256px, which keeps 0.7 of them.
    assert ours["opensora-v2"] == {**skip, "256px-17f-16x9": (1 - sum(skip.values())) * Fraction(7, 10)}
    assert ours["opensora-v1.2"] == {**stay, "256px-17f-16x9": (1 - sum(stay.values())) * Fraction(7, 10)}


def assert_frequencies(counts: Counter[str | None], choices: Choices) -> None:
    """Check that each count is within the bounds that fair draws exceed for about one seed in a million."""
    total = sum(counts.values())
    expected: dict[str | None, Fraction] = {**probabilities_of(choices), None: choices.rest}
    assert set(counts) <= {name for name, share in expected.items() if share}
    for name, share in expected.items():
        spread = math.sqrt(total * share * (1 - share))
        assert abs(counts[name] - total * share) <= Z_AT_1E_6 * spread + 0.5, name


@pytest.mark.parametrize("version", ["opensora-v2", "opensora-v1.2"])
@pytest.mark.parametrize("form", [SEED, PAIRS], ids=["numbers", "pairs"])
def test_draw_frequencies_match_the_probabilities(form: dict[str, Any], version: str) -> None:
    """Open-Sora checklist, rows 6 and 7, at alpha = 1e-6 with a fixed seed: one draw per clip, and Open-Sora's walk."""
    config = BucketConfig(opensora=OpenSoraConfig(bucket_config=form, probabilities=version))
    clip = ClipFacts(70, 1080, 1920)
    choices = config.choices(clip)
    generator = np.random.default_rng(6)
    drawn = Counter(bucket and bucket.id for bucket in map(choices.draw, generator.random(20_000)))
    assert_frequencies(drawn, choices)
    uniforms = iter(generator.random, None)
    walked = Counter(bucket and bucket.id for bucket in (config.walk(clip, uniforms) for _ in range(5_000)))
    assert_frequencies(walked, choices)


def test_policies_limit_and_choose_as_documented() -> None:
    """Compares random clips with a reimplementation of each policy, with all probabilities 1."""
    rng = random.Random(2)
    kinds: Counter[str] = Counter()
    for number in range(2000):
        height, width, num_frames = rng.randint(200, 1100), rng.randint(200, 2000), rng.randint(10, 90)
        if number % 10 == 0:
            policy, given, config = drawn_policy(rng)
        choices = config.choices(ClipFacts(num_frames, height, width))
        kinds[choices.kind] += 1
        expected = restated_policy(given, policy, num_frames, height, width)
        got = key_of(choices.buckets[0]) if choices.buckets else None
        assert got == expected, (policy, given, num_frames, height, width, choices)
    assert {"", "max-upscale", "max-crop", "too-few-frames", "too-small"} <= set(kinds)


def drawn_policy(rng: random.Random) -> tuple[Policy, dict[str, tuple[int, ...]], BucketConfig]:
    policy = Policy(
        ratio=rng.choice(("nominal", "log")),
        frames=rng.choice(("resolution-first", "longest")),
        max_upscale=rng.choice((None, Fraction(1), Fraction(11, 10))),
        max_crop=rng.choice((None, Fraction(1, 50), Fraction(1, 10))),
    )
    given = {name: tuple(rng.sample((1, 17, 33, 65), rng.randint(1, 3))) for name in ("256px", "512px", "720p")}
    form = {name: dict.fromkeys(of_name, (1.0, 1)) for name, of_name in given.items()}
    return policy, given, BucketConfig(opensora=OpenSoraConfig(bucket_config=form), policy=policy)


def restated_policy(
    given: dict[str, tuple[int, ...]], policy: Policy, num_frames: int, height: int, width: int
) -> tuple[str, int, int, int] | None:
    found: list[tuple[int, int, tuple[str, int, int, int]]] = []
    for place, name in enumerate(("720p", "512px", "256px")):
        pixels, table = restated_sizes(name, 16)
        fitting = [count for count in given[name] if 1 < count <= num_frames]
        if height * width * 5 < pixels * 4 or not fitting:
            continue

        def distance(ratio: str, table: dict[str, tuple[int, int]] = table) -> Fraction:
            h, w = table[ratio]
            if policy.ratio == "log":
                return max(Fraction(height * w, width * h), Fraction(width * h, height * w))
            names = [Fraction(side) for side in ratio.split(":")]
            return abs(Fraction(height, width) - names[1] / names[0])

        h, w = table[min(table, key=distance)]
        scale = max(Fraction(h, height), Fraction(w, width))
        kept = Fraction(h * w) / (scale * height * scale * width)
        if policy.max_upscale is not None and scale > policy.max_upscale:
            continue
        if policy.max_crop is not None and 1 - kept > policy.max_crop:
            continue
        found.append((place, max(fitting), (name, max(fitting), h, w)))
        if policy.frames == "resolution-first":
            return found[0][2]
    return min(found, key=lambda one: (-one[1], one[0]))[2] if found else None
