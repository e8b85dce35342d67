"""Tests of bucket configurations: accepted files, error messages, and the resulting tables."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.bucket import Bucket, match_buckets, parse_bucket, parse_buckets
from streamvid.buckets.classes import ClipFacts
from streamvid.buckets.config import BucketConfig, SizeRule
from streamvid.buckets.document import bucket_config_from_json, bucket_config_to_json, load_bucket_config
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.geometry import aspect_table
from streamvid.buckets.opensora import OpenSoraConfig
from streamvid.buckets.policy import Policy
from streamvid.buckets.ratios import Ratios
from streamvid.errors import ConfigError, NoBucketError
from streamvid.shipped import shipped

OPENSORA_YAML = """
bucket_config: {
  "256px": {1: [1.0, 45], 33: [[1.0, 0.33], 12], 16: [0.5, 20]},
  "768px_ar16:9": {1: [0.5, 13], 33: [0.0, None]},
  "1024px_max": {1: [0.5, 7]},
}
probabilities: opensora-v2
frame_rate: {rule: cap, fps: 24}
"""


def written(folder: Path, text: str, name: str = "buckets.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_open_soras_format_is_read(tmp_path: Path) -> None:
    """Open-Sora checklist, rows 3 and 15: names with _max and _ar, pairs, (0.0, None) and batch sizes."""
    config = load_bucket_config(written(tmp_path, OPENSORA_YAML))
    table, wide = aspect_table("256px"), aspect_table("768px")["16:9"]
    by_area = {ratio: height * width for ratio, (height, width) in aspect_table("1024px").items()}
    largest = max(by_area, key=lambda ratio: by_area[ratio])
    expected = {Bucket(count, *size, "256px", ratio) for ratio, size in table.items() for count in (1, 16, 33)}
    expected |= {Bucket(1, *wide, "768px", "16:9"), Bucket(1, *aspect_table("1024px")[largest], "1024px", largest)}
    assert set(config.table.buckets) == expected
    assert config.batch_sizes["256px-33f-1x1"] == 12
    assert config.batch_sizes["768px-1f-16x9"] == 13
    assert config.frame_rate == FrameRate("cap", Fraction(24))
    # 60 frames at 30 fps become 30 frames at half the rate, too few for 33.
    assert [bucket.num_frames for bucket in config.choices(ClipFacts(60, 720, 1280, 30.0)).buckets] == [16]
    assert [bucket.num_frames for bucket in config.choices(ClipFacts(66, 720, 1280, 30.0)).buckets] == [33, 16]


def test_open_soras_mapping_without_a_key_is_its_bucket_config(tmp_path: Path) -> None:
    alone = load_bucket_config(
        written(tmp_path, '"256px": {1: [1.0, 45], 33: [1.0, 12]}\n768px_ar16:9: {1: [0.5, 3]}\n')
    )
    assert alone.batch_sizes["256px-33f-1x1"] == 12 and alone.batch_sizes["768px-1f-16x9"] == 3


def test_open_soras_python_configs_are_parsed_but_not_executed(tmp_path: Path) -> None:
    text = "import os\nos.abort()\nbucket_config = {'_delete_': True, '256px': {33: ((1.0, 0.5), 12), 17: (1.0, 4)}}\n"
    path = written(tmp_path, text, "stage1.py")
    with pytest.raises(
        ConfigError,
        match=r"pair \[1.0, 0.5\] is ambiguous with probabilities=None; set probabilities to opensora-v2 if",
    ):
        load_bucket_config(path)
    config = load_bucket_config(path, ["probabilities=opensora-v1.2", "multiple=32"])
    assert {bucket.num_frames for bucket in config.table.buckets} == {17, 33}
    assert all(bucket.width % 32 == 0 for bucket in config.table.buckets)
    with pytest.raises(ConfigError, match="assigns neither bucket_config"):
        load_bucket_config(written(tmp_path, "x = 1\n", "other.py"))
    # As in Python, the last assignment counts, and local variables of functions do not.
    text = "bucket_config = {'144px': {9: (1.0, 1)}}\n" + text + "def f():\n    bucket_config = {}\n"
    config = load_bucket_config(written(tmp_path, text, "twice.py"), ["probabilities=opensora-v1.2"])
    assert {bucket.num_frames for bucket in config.table.buckets} == {17, 33}


def test_open_sora_1_configurations_keep_their_names_and_meaning(tmp_path: Path) -> None:
    """Names without a unit exist only in version 1, so pairs have that version's meaning; tables may use them too."""
    table = """bucket_config:
  512: {1: [1.0, 141], 51: [[1.0, 0.25], 8]}
  2k: {1: [0.5, 4]}
ratios: {512: {area: 262144, "1:1": 512x512, "1:0.5": 736x352}, 2k: {"1:1": 1920x1920}}
"""
    config = load_bucket_config(written(tmp_path, table))
    assert config.batch_sizes["512px-51f-1x1"] == 8
    assert {(bucket.resolution, bucket.height) for bucket in config.table.buckets} == {
        ("512px", 512),
        ("512px", 352),
        ("1440p", 1920),
    }
    found = config.choices(ClipFacts(52, 1080, 1920))
    assert [(bucket.id, share) for bucket, share in found.options] == [("512px-51f-1x0.5", Fraction(1, 4))]
    too_short = config.choices(ClipFacts(51, 1080, 1920))
    assert too_short.reason.endswith("51 frames, but the shortest bucket has 51 and needs 1 more, as in Open-Sora 1")
    assert bucket_config_from_json(bucket_config_to_json(config)) == config
    alone = load_bucket_config(written(tmp_path, "512: {51: [1.0, 8]}\n"))
    assert alone.choices(ClipFacts(51, 1080, 1920)).kind == "too-few-frames"
    pairs = "bucket_config = {'360p': {51: ((1.0, 0.25), 8)}}\nprobabilities = 'opensora-v1.2'\n"
    assert load_bucket_config(written(tmp_path, pairs, "stage2.py")).opensora == OpenSoraConfig(
        {"360p": {51: ((1.0, 0.25), 8)}}, "opensora-v1.2"
    )


def test_open_sora_1_0_has_one_size(tmp_path: Path) -> None:
    text = "num_frames = 16\nframe_interval = 3\nimage_size = (256, 512)\nbucket_config = None\n"
    config = load_bucket_config(written(tmp_path, text, "16x256x512.py"))
    assert [bucket.shape for bucket in config.table.buckets] == [(16, 256, 512)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bucket_config = {'256q': {1: (1.0, 4)}}", "resolution='256q' is not a valid resolution name"),
        ("image_size = (256,)\nnum_frames = 16", "cannot read the buckets in"),
        ("bucket_config = " + "-" * 100_000 + "1", "cannot read the buckets in"),
        ("bucket_config = {'256px': {1, 2}}", "must contain frame counts"),
    ],
)
def test_python_configs_that_cannot_be_read_are_named(tmp_path: Path, text: str, message: str) -> None:
    """SAFE-1."""
    with pytest.raises(ConfigError, match=message):
        load_bucket_config(written(tmp_path, text, "stage1.py"))


@pytest.mark.parametrize("multiple", [8, 16, 32, 64])
def test_every_side_is_a_multiple(multiple: int) -> None:
    """Open-Sora checklist, row 4."""
    config = BucketConfig(resolution=("480p",), num_frames=(17,), ratios=Ratios(multiple))
    assert {(b.aspect_ratio, b.height, b.width) for b in config.table.candidates} == {
        (ratio, *size) for ratio, size in aspect_table("480p", multiple).items()
    }
    assert all(bucket.height % multiple == bucket.width % multiple == 0 for bucket in config.table.buckets)


def test_a_custom_table_replaces_the_generated_one(tmp_path: Path) -> None:
    """Open-Sora checklist, row 5: a fixed table with the sizes of Open-Sora 1.2, whose 480p has a different area."""
    text = """
        bucket_config: {"480p": {51: [1.0, 2]}, "480p_ar1:1": {1: [1.0, 8]}}
        ratios: {"480p": {area: 409920, "1:0.56": 854x480, "1:1.78": 480x854, "1:1": 640x640}}
        multiple: 2
    """
    config = load_bucket_config(written(tmp_path, text))
    assert [bucket.shape for bucket in config.table.buckets] == [
        (51, 480, 854),
        (51, 854, 480),
        (51, 640, 640),
        (1, 640, 640),
    ]
    assert [b.id for b in config.choices(ClipFacts(60, 480, 854)).buckets] == ["480p-51f-1x0.56"]
    # 0.8 of the given area, not of the usual area of 480p.
    assert config.choices(ClipFacts(60, 512, 640)).buckets == ()
    assert config.choices(ClipFacts(60, 427, 768)).buckets != ()


def test_ratios_are_bounded_or_evenly_spaced() -> None:
    bounded = BucketConfig(
        resolution=("480p",), num_frames=(17,), ratios=Ratios(16, {}, Fraction(1, 2), Fraction("1.5"))
    )
    assert [bucket.aspect_ratio for bucket in bounded.table.buckets] == [
        "9:16",
        "5:8",
        "3:2",
        "4:3",
        "1:1",
        "1:2",
        "1:1.85",
        "2:3",
        "3:4",
    ]
    spaced = BucketConfig(resolution=("512px",), num_frames=(17,), ratios=Ratios(32, num_ar_buckets=7))
    names = [str(bucket.aspect_ratio) for bucket in spaced.table.buckets]
    assert names == ["0.5:1", "0.63:1", "0.7937:1", "1:1", "1.2599:1", "1.5874:1", "2:1"]
    for bucket in spaced.table.buckets:
        assert bucket.height % 32 == bucket.width % 32 == 0
        assert abs(bucket.height * bucket.width / 512**2 - 1) < 0.08
    assert parse_bucket("512px-17f-1x1").shape == (17, 512, 512)
    clip = ClipFacts(20, 720, 1143)
    assert [bucket.aspect_ratio for bucket in spaced.choices(clip).buckets] == ["1.5874:1"]


def test_frame_rules_and_models_are_enforced() -> None:
    with pytest.raises(
        ConfigError,
        match=r"832x480-80f: a count of 80 frames does not follow the rule 4k\+1; nearest allowed: 77 and 81",
    ):
        BucketConfig(buckets=parse_buckets("832x480@80"), frame_rule=FrameRule(4))
    config = load_bucket_config("wan2.1-480p")
    assert config.model is not None
    with pytest.raises(ConfigError, match="80 frames"):
        BucketConfig(buckets=parse_buckets("832x480@80"), model=config.model)
    with pytest.raises(ConfigError, match="requires sides that are multiples of 16; set multiple to 16"):
        BucketConfig(size=SizeRule(max_pixels=399360, max_frames=81), ratios=Ratios(8), model=config.model)
    capped = replace(config.model, max_num_frames=81)
    assert (
        BucketConfig(size=SizeRule(max_pixels=399360, max_frames=81), ratios=Ratios(16), model=capped).counts[-1] == 81
    )
    with pytest.raises(ConfigError, match="max_frames for wan2.1 has 201 frames; at most 81 are allowed"):
        BucketConfig(size=SizeRule(max_pixels=399360, max_frames=201), ratios=Ratios(16), model=capped)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no buckets are given; set exactly one of"),
        ("{buckets: [832x480@81], resolution: [256px]}", "buckets and resolution cannot be combined"),
        ("{resolution: [256px]}", "resolution requires num_frames"),
        ("{max_pixels: 1000}", "max_pixels with neither num_frames nor max_frames"),
        ("{height: 480, max_frames: 81}", "height=480 requires width; set both for one fixed size, or max_pixels"),
        ("{height: 480, width: 830, max_frames: 81}", "width=830 is not a multiple of 16; nearest allowed: 816 and 832"),
        ("{height: 480, width: 832, max_frames: 80}", r"max_frames: a count of 80 frames does not follow the rule 4k\+1"),
        ("{buckets: [832x480@2], frame_rule: 4k+3}", r"does not follow the rule 4k\+3; nearest allowed: 3$"),
        ("{probabilities: opensora-v2}", "bucket_config keeps no clips: it is empty; add a resolution"),
        ("{buckets: [832x480@81], max_frames: 81}", "max_frames=81 cannot be combined with buckets"),
        ("{buckets: [832x480@81], min_ar: 0.5}", "min_ar cannot be combined with buckets"),
        ("{bucket: [832x480@81]}", "bucket is not a field; did you mean 'buckets'"),
        ("{buckets: [33x480x832]}", "write the bucket as '832x480@33'"),
        ('{bucket_config: {256px: {33: [[1.0, 0.33], 12]}}}', "probabilities=None; set probabilities to opensora-v2"),
        ('{bucket_config: {256px: {1: [[1.0, 0.3], 12]}}, probabilities: opensora-v2}', "images need one probability"),
        ('{bucket_config: {256px: {33: [1.5, 12]}}}', "probability=1.5: must be from 0 to 1"),
        ('{bucket_config: {256px: {33: [1.0, [4, 8]]}}}', r"the batch size \[4, 8\] is a range for Open-Sora's search"),
        ('{bucket_config: {256px: {33: [1.0, 0]}}}', "batch size=0: must be an integer from 1"),
        ('{bucket_config: {256px: {33: 1.0}}}', r"=1.0: must be \[probability, batch size\]"),
        ('{bucket_config: {256px: {x: [1.0, 2]}}}', "bucket_config"),
        ('{bucket_config: {256px: {}}}', "has no frame counts"),
        ('{bucket_config: {256px: {33: [0.0, 1]}}}', "every probability is 0"),
        ('{bucket_config: {256px_min: {33: [1.0, 1]}}}', "the suffix _min is unknown; use 256px, 256px_max"),
        ('{bucket_config: {"256px_ar7:5": {33: [1.0, 1]}}}', "256px has no ratio 7:5; available: 2.39:1"),
        ('{bucket_config: {"256q": {33: [1.0, 1]}}}', "resolution='256q' is not a valid resolution name"),
        ('{bucket_config: {512: {51: [9, [4, 12]]}}}', "probability=9: must be from 0 to 1; if this configuration is for"),
        ('{bucket_config: {512: {51: [null, 6]}}}', "probability=None is valid only for Open-Sora's evaluation"),
        ('{bucket_config: {512: {51: [1, 1]}}, ratios: {512: {"1:1": 512x512}, 512px: {"1:1": 512x512}}}', "two of these names"),
        ('{bucket_config: {256px: {33: [1.0, 1]}, "256px_ar16:9": {33: [1.0, 2]}}}', "two batch sizes for bucket 256px-33f-16x9, 1 and 2"),
        ('{bucket_config: {256px: {33: [0.5, 1]}}, policy: {frames: longest}}', "cannot be combined with keep probabilities"),
        ('{buckets: [832x480@81], policy: {ratio: real}}', "policy.ratio='real': must be 'nominal' or 'log'"),
        ('{buckets: [832x480@81], policy: {max_crop: 2}}', "policy.max_crop=2: must be a number from 0 to 1"),
        ('{buckets: [832x480@81], policy: {crop: 2}}', "policy has no field 'crop'"),
        ('{buckets: [832x480@81], assign: any}', "assign='any': must be 'draw' or 'all'"),
        ('{buckets: [832x480@81], frame_rate: {fps: 16}}', "frame_rate.rule='native' with fps=16: omit fps for the 'native' rule"),
        ('{buckets: [832x480@81], frame_rate: {rule: cap, fps: .inf}}', "fps=inf: must be a finite number"),
        ('{buckets: [832x480@81], model: {multiple: 16}}', "is missing required fields; add frame_rule"),
        ('{buckets: [832x480@81], model: {frame_rule: 4k+1, multiple: 16, fps: .inf}}', "fps=inf: must be a finite number"),
        ('{buckets: [832x480@81], frame_rate: {rule: cap, rate: 16}}', "frame_rate has no field 'rate'"),
        ('{resolution: [480p], num_frames: [17], min_ar: 2, max_ar: 1}', "min_ar=2 is above max_ar=1"),
        ('{resolution: [480p], num_frames: [17], min_ar: 90}', "480p has no ratio from min_ar=90"),
        ('{resolution: [480p], num_frames: [17], ratios: {480p: {"0.56": 854x480}}}', "write the height/width ratio 0.56 as '1:0.56'"),
        ('{resolution: [480p], num_frames: [17], ratios: {480p: {"16:9": 854x480}}}', "nearest allowed: 848 and 864"),
        ('{resolution: [480p], num_frames: [17], ratios: {480p: {"16:9": "854,480"}}}', "is not a valid size; write it as width"),
    ],
)  # fmt: skip
def test_invalid_configurations_are_refused_with_a_reason(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_bucket_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("33x480x832", "write the bucket as '832x480@33' if it is frames x height x width"),
        ("832x480x33", "write the bucket as '832x480@33' if it is width x height x frames"),
        ("80x16x96", "write the bucket as '80x16@96' if it is width x height x frames or '96x16@80' if it is frames x"),
    ],
)
def test_bare_triples_are_refused_wherever_a_bucket_name_is_expected(text: str, shown: str) -> None:
    """LTX writes WxHxF and finetrainers FxHxW; the message shows each possible meaning of the given numbers."""
    buckets = parse_buckets("832x480@33")
    for refuse in (parse_bucket, parse_buckets, lambda name: match_buckets(name, buckets)):
        with pytest.raises(ConfigError, match=shown):
            refuse(text)


def test_configurations_round_trip() -> None:
    """Every configuration, including all presets, equals itself after a round trip through the manifest's JSON."""
    for path in sorted(shipped("configs/buckets").glob("*.yaml")):
        config = load_bucket_config(path)
        assert bucket_config_from_json(json.loads(json.dumps(bucket_config_to_json(config)))) == config, path
    sized = BucketConfig(
        size=SizeRule(max_pixels=399360, max_frames=81),
        ratios=Ratios(32),
        policy=Policy("log", "longest", Fraction(6, 5), Fraction(1, 3)),
        frame_rate=FrameRate("resample", Fraction(30000, 1001)),
        frame_rule=FrameRule(8),
        assign="all",
    )
    assert bucket_config_from_json(json.loads(json.dumps(bucket_config_to_json(sized)))) == sized
    with pytest.raises(ConfigError, match="no field 'bucket'"):
        bucket_config_from_json({"bucket": []})


@given(
    num_frames=st.integers(1, 200), height=st.integers(16, 2500), width=st.integers(16, 2500), is_image=st.booleans()
)
def test_plain_configurations_assign_like_their_tables(
    num_frames: int, height: int, width: int, is_image: bool
) -> None:
    for given_buckets in (
        {"buckets": parse_buckets("832x480@81,480x832@81,624x624@33,416x240@17,240x416@49,416x240@1")},
        {"resolution": ("256px", "480p"), "num_frames": (1, 17, 65)},
    ):
        config = BucketConfig(**given_buckets)  # type: ignore[arg-type]
        choices = config.choices(ClipFacts(num_frames, height, width, is_image=is_image))
        try:
            bucket = config.table.assign(num_frames, height, width, is_image)
        except NoBucketError as error:
            assert (choices.options, choices.reason, choices.kind) == ((), str(error), error.kind)
        else:
            assert (choices.options, choices.rest, choices.reason) == (((bucket, Fraction(1)),), 0, "")


def test_a_clip_without_a_bucket_has_a_rejection_kind() -> None:
    def kind(config: BucketConfig, *clip: int, is_image: bool = False) -> str:
        choices = config.choices(ClipFacts(*clip, is_image=is_image))
        assert choices.options == () and choices.rest == 1 and choices.draw(0.0) is None and choices.reason
        return choices.kind

    wan = BucketConfig(buckets=parse_buckets("832x480@17,416x240@49"))
    assert kind(wan, 16, 1080, 1920) == "too-few-frames"
    assert kind(wan, 60, 100, 100) == "too-small"
    assert kind(wan, 20, 240, 416) == "too-short-for-its-size"
    assert kind(wan, 1, 1080, 1920, is_image=True) == "no-image-bucket"
    assert kind(BucketConfig(buckets=parse_buckets("832x480@1")), 60, 1080, 1920) == "no-video-bucket"
    strict = BucketConfig(
        buckets=parse_buckets("832x480@17"), policy=Policy(max_upscale=Fraction(1), max_crop=Fraction(1, 10))
    )
    assert kind(strict, 20, 470, 832) == "max-upscale"
    assert kind(strict, 20, 1080, 1080) == "max-crop"
    rated = BucketConfig(buckets=parse_buckets("832x480@17"), frame_rate=FrameRate("resample", Fraction(16)))
    assert kind(rated, 60, 1080, 1920) == "unknown-duration"
    assert rated.choices(ClipFacts(60, 1080, 1920, 30.0)).buckets == rated.table.buckets
    assert rated.choices(ClipFacts(60, 1080, 1920, float("nan"))).kind == "unknown-duration"
    for config in (
        wan,
        BucketConfig(size=SizeRule(max_pixels=1000, max_frames=5)),
        BucketConfig(size=SizeRule(height=16, width=16, max_frames=5)),
    ):
        assert kind(config, 60, 0, 1920) == "too-small"
