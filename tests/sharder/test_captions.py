"""Tests of captions, from the user's metadata to the index and the tars, and of datasets that contain only text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.captions import captions_from_json
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, SealedError, SourceError
from streamvid.sharder.sharder import dry_run, shard
from tests.clips import encode, frames_of
from tests.conftest import run_streamvid
from tests.files import read_webdataset, write_rows
from tests.shard_options import shard_options

BUCKETS = parse_buckets("96x64@5")
LISTS: list[Any] = [["a dog", "a brown dog runs"], [{"text": "sea", "weight": 3}, {"text": "waves"}], "alone", [], None]
WEIGHTS = [[("a dog", 1.0), ("a brown dog runs", 1.0)], [("sea", 3.0), ("waves", 1.0)], [("alone", 1.0)], [], []]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of five small clips, 0.mp4 to 4.mp4."""
    folder = tmp_path_factory.mktemp("clips")
    frames = frames_of("bikes", 96, 64, 14)
    for number in range(5):
        (folder / f"{number}.mp4").write_bytes(encode(frames[number : number + 10]))
    return folder


def built(source: Path, dest: Path, **options: Any) -> list[dict[str, Any]]:
    """Shard the source; return the index rows in the order of their files."""
    shard(source, dest, shard_options(buckets=BUCKETS, workers=1, **options))
    return sorted(open_dataset(dest).samples_table().to_pylist(), key=lambda row: str(row["source"]))


def captions_of(row: dict[str, Any]) -> list[tuple[str, float]]:
    if row["captions"] is not None:
        return list(captions_from_json(row["captions"]))
    return [] if row["text"] is None else [(row["text"], 1.0)]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_list_of_captions_keeps_all_with_their_weights(clips: Path, tmp_path: Path, suffix: str) -> None:
    """The first caption is `text` and the caption in the tar; a CSV cell holds a list as JSON."""
    rows = [{"video": str(clips / f"{n}.mp4"), "caption": value} for n, value in enumerate(LISTS)]
    found = built(write_rows(tmp_path / f"meta{suffix}", rows), tmp_path / "ds")
    assert [captions_of(row) for row in found] == WEIGHTS
    assert [row["text"] for row in found] == ["a dog", "sea", "alone", None, None]
    assert [row["captions"] is None for row in found] == [False, False, True, True, True]
    members = {row["key"]: row for row in found}
    for tar in sorted((tmp_path / "ds").rglob("*.tar")):
        read = read_webdataset(tar)
        for sample in read:
            row, about = members.pop(sample["__key__"]), json.loads(sample["json"])
            assert sample["txt"].decode() == (row["text"] or "")
            told = [(one["text"], one["weight"]) for one in about.get("captions", [])]
            assert told == (captions_of(row) if row["captions"] else [])
    assert not members


def test_a_parquet_list_and_a_column_of_weights(clips: Path, tmp_path: Path) -> None:
    """Neither the captions nor the weights become a user column."""
    rows = [
        {"video": str(clips / f"{n}.mp4"), "caption": texts, "w": weights, "score": n}
        for n, (texts, weights) in enumerate([(["a", "b"], [1.0, 0.5]), (["c"], [2.0]), (["d", "e"], None)])
    ]
    meta = write_rows(tmp_path / "meta.parquet", rows)
    found = built(meta, tmp_path / "ds", caption_weight_column="w")
    assert [captions_of(row) for row in found] == [[("a", 1.0), ("b", 0.5)], [("c", 1.0)], [("d", 1.0), ("e", 1.0)]]
    assert open_dataset(tmp_path / "ds").user_columns == ("score",)


def test_several_columns_are_captions_of_one_sample(clips: Path, tmp_path: Path) -> None:
    """On the command line the flag is repeated; captions that are missing in a row are omitted."""
    values = [("short", "long one"), ("", "long two"), ("only short", "")]
    rows = [{"video": f"{n}.mp4", "brief": a, "detailed": b, "score": n} for n, (a, b) in enumerate(values)]
    source = tmp_path / "in"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.mp4").write_bytes((clips / f"{number}.mp4").read_bytes())
    write_rows(source / "metadata.csv", rows)
    flags = ("--caption-column", "brief", "--caption-column", "detailed", "--buckets", "96x64@5")
    run_streamvid("shard", source, tmp_path / "ds", *flags)
    found = sorted(open_dataset(tmp_path / "ds").samples_table().to_pylist(), key=lambda row: row["source"])
    texts = [[text for text, _ in captions_of(row)] for row in found]
    assert texts == [["short", "long one"], ["long two"], ["only short"]]
    with pytest.raises(
        SourceError, match=r"captions.column='breif' is not .* \(did you mean 'brief'\?\); available: brief"
    ):
        built(source, tmp_path / "no", caption_column=("detailed", "breif"))


@pytest.mark.slow
def test_lines_of_a_text_file(clips: Path, tmp_path: Path) -> None:
    """With `caption_lines` each line is a caption; otherwise the file is one caption."""
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.mp4").write_bytes((clips / "0.mp4").read_bytes())
    (source / "a.txt").write_text("first\n\n  second \nthird")
    (row,) = built(source, tmp_path / "lines", caption_lines=True)
    assert captions_of(row) == [("first", 1.0), ("second", 1.0), ("third", 1.0)]
    (row,) = built(source, tmp_path / "whole")
    assert captions_of(row) == [("first\n\n  second \nthird", 1.0)]


REJECTED: list[tuple[Any, str]] = [
    (["x"] * 257, "the sample has 257 captions; at most 256 are allowed"),
    ([["x"]], "a caption has type list; it must be text"),
    ([{"text": "x", "score": 1}], "invalid caption fields (score, text); a caption must have either text or caption"),
    ([{"text": "x", "weight": -1}], "a caption has weight -1; weights must be numbers from 0"),
    ([{"text": "x", "weight": 0}, {"text": "y", "weight": 0}], "all captions have weight 0"),
    (["x", "y" * 70_000], "bytes long, but at most 65536 are allowed"),
    (["\ud800", "y"], "not valid UTF-8"),
    ([f"{n}" + "y" * 60_000 for n in range(6)], "the captions total 360061 bytes, but at most 262144 are allowed"),
]


def test_invalid_captions_are_rejected(clips: Path, tmp_path: Path) -> None:
    """SHARD-3."""
    captions = ["good", *(caption for caption, _ in REJECTED)]
    rows = [{"video": str(clips / "0.mp4"), "caption": caption} for caption in captions]
    found = built(write_rows(tmp_path / "meta.json", rows), tmp_path / "ds")
    assert [row["text"] for row in found] == ["good"]
    rejected = open_dataset(tmp_path / "ds").rejections_table().to_pylist()
    assert [row["row"] for row in rejected] == list(range(1, 9))
    for row, (_, reason) in zip(rejected, REJECTED, strict=True):
        assert reason in row["reason"]


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("truncates", [False, True])
def test_long_captions_are_rejected_or_truncated(clips: Path, tmp_path: Path, truncates: bool, lines: bool) -> None:
    """SHARD-3: this applies to captions from a column and from .txt files, even if the limit is inside a character."""
    source = tmp_path / "in"
    source.mkdir()
    texts = {"a": "x" + "é" * 40_000, "b": "é" * 40_000 + "x", "c": "y" * 65_536, "d": "z" * 65_537}
    for number, (name, text) in enumerate(texts.items()):
        (source / f"{name}.mp4").write_bytes((clips / f"{number}.mp4").read_bytes())
        (source / f"{name}.txt").write_text(text)
    if not lines:
        write_rows(source / "metadata.csv", [{"video": f"{name}.mp4", "caption": text} for name, text in texts.items()])
    chosen = {"long_captions": "truncate"} if truncates else {}
    found = built(source, tmp_path / "out", caption_lines=lines and not truncates, **chosen)
    if truncates:
        cut = [texts["a"][: 1 + 32_767], texts["b"][:32_768], texts["c"], texts["d"][:-1]]
        assert [row["text"] for row in found] == cut
    else:
        assert [row["text"] for row in found] == [texts["c"]]
        reasons = [row["reason"] for row in open_dataset(tmp_path / "out").rejections_table().to_pylist()]
        assert len(reasons) == 3 and all("bytes long, but at most 65536 are allowed" in reason for reason in reasons)


def test_mismatched_weights_are_rejected(clips: Path, tmp_path: Path) -> None:
    """SHARD-3."""
    cases: list[tuple[Any, Any]] = [(["a", "b"], [1]), (["a"], "much"), ([{"text": "a", "weight": 1}], [1]), ("g", [2])]
    rows = [{"video": str(clips / f"{n}.mp4"), "caption": a, "w": b} for n, (a, b) in enumerate(cases)]
    found = built(write_rows(tmp_path / "meta.json", rows), tmp_path / "ds", caption_weight_column="w")
    assert [row["text"] for row in found] == ["g"]
    reasons = [row["reason"] for row in open_dataset(tmp_path / "ds").rejections_table().to_pylist()]
    assert reasons[0].startswith("the sample has 2 captions and 1 weight(s)")
    assert reasons[1].startswith("a caption has weight 'much'; weights must be numbers from 0 to 1e12")
    assert reasons[2].startswith("the sample has weights both in its captions and in the weight column")


def test_text_that_only_looks_like_a_list_is_a_caption(clips: Path, tmp_path: Path) -> None:
    """Captions in CSV cells may be Open-Sora's score texts in brackets, numbers, and unclosed quotes."""
    texts = ["[aesthetic score: 5.5]", "[1]", '["a', "[[1, 2]]"]
    rows = [{"video": str(clips / f"{n}.mp4"), "caption": text} for n, text in enumerate(texts)]
    assert [row["text"] for row in built(write_rows(tmp_path / "m.csv", rows), tmp_path / "ds")] == texts


@pytest.mark.slow
def test_a_changed_second_caption_changes_the_dataset(clips: Path, tmp_path: Path) -> None:
    """SHARD-1: the same input is recognized, and captions after the first are part of it."""
    rows = [{"video": str(clips / "0.mp4"), "caption": ["a", "b"]}]
    meta = write_rows(tmp_path / "meta.json", rows)
    first = built(meta, tmp_path / "ds")
    assert built(meta, tmp_path / "ds") == first
    write_rows(meta, [{**rows[0], "caption": ["a", "c"]}])
    with pytest.raises(SealedError, match="but files, sizes, captions or columns have changed"):
        built(meta, tmp_path / "ds")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"caption_column": ("a", "a")}, "list each column only once"),
        ({"caption_column": ("a", "")}, "pass only '' to disable captions"),
        ({"caption_column": 3}, "must be a column name"),
        ({"caption_column": "a", "caption_weight_column": "a"}, "must differ from the caption columns"),
        ({"caption_lines": "yes"}, "captions.lines='yes': must be True or False"),
    ],
)
def test_invalid_caption_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard_options(resolution=("128px",), num_frames=(5,), **options)


PROMPTS = [
    {"prompt": f'number {i % 17}, "quoted" é', "aesthetic": i / 4 if i % 3 else None, "style": "ab"[i % 2]}
    for i in range(40)
]


def text_dataset(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    shard(write_rows(folder / "prompts.csv", rows), folder / "ds", shard_options(clips="text", workers=1, **options))
    return folder / "ds"


def test_prompts_become_a_dataset_that_every_verb_accepts(tmp_path: Path) -> None:
    """SHARD-3, TEXT: columns are kept, equal prompts are separate samples, and an empty prompt is rejected."""
    source = write_rows(tmp_path / "prompts.csv", [*PROMPTS, {"prompt": " ", "aesthetic": 1, "style": "a"}])
    root = tmp_path / "ds"
    run_streamvid("shard", source, root, "--clips", "text")
    dataset = open_dataset(root)
    rows = dataset.samples_table().to_pylist()
    assert sorted(row["text"] for row in rows) == sorted(str(row["prompt"]) for row in PROMPTS)
    assert len({row["key"] for row in rows}) == 40 and len({row["record_key"] for row in rows}) == 17
    told = {(row["text"], row["user.aesthetic"], row["user.style"]) for row in rows}
    assert told == {(row["prompt"], row["aesthetic"], row["style"]) for row in PROMPTS}
    (rejected,) = dataset.rejections_table().to_pylist()
    assert (rejected["row"], rejected["reason"]) == (40, "the row has no caption")
    assert [bucket.id for bucket in dataset.manifest.buckets] == ["text"] and dataset.manifest.clips == "text"
    run_streamvid("verify", root, "--deep")
    run_streamvid("copy", root, tmp_path / "copied")
    run_streamvid("verify", tmp_path / "copied", "--deep")
    stats = json.loads(run_streamvid("stats", root, "--json").stdout)
    assert (stats["samples"], stats["columns"]) == (40, ["aesthetic", "style"])
    plan = json.loads(run_streamvid("plan", root, "--num-ranks", 2, "--batch-size", 4, "--json").stdout)
    assert plan["steps"] == [5]


def test_prompts_are_read_by_webdataset(tmp_path: Path) -> None:
    """The caption is a member as for a video, and its columns are in the JSON member."""
    root = text_dataset(tmp_path / "in", PROMPTS)
    (tar,) = sorted(root.rglob("*.tar"))
    read = read_webdataset(tar)
    told = sorted((s["txt"].decode(), json.loads(s["json"])["columns"]["style"]) for s in read)
    assert told == sorted((str(row["prompt"]), str(row["style"])) for row in PROMPTS)
    assert {name for sample in read for name in sample if not name.startswith("__")} == {"txt", "json"}


@pytest.mark.slow
def test_more_prompts_change_no_key_and_no_split(tmp_path: Path) -> None:
    """Keys depend on the text, and equal prompts are never in different splits."""
    found = []
    for count in (30, 40):
        root = text_dataset(tmp_path / str(count), PROMPTS[:count], val_fraction=0.3)
        found.append(open_dataset(root).samples_table().to_pylist())
    few, many = ({row["key"]: (row["text"], row["split"]) for row in rows} for rows in found)
    assert few.items() <= many.items() and len({split for _, split in many.values()}) == 2
    sides: dict[str, set[str]] = {}
    for text, split in many.values():
        sides.setdefault(text, set()).add(split)
    assert all(len(side) == 1 for side in sides.values())


@pytest.mark.slow
def test_shards_of_prompts_stay_small(tmp_path: Path) -> None:
    """PLAN-6: a row group of texts stays small, however large tars may be."""
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": f"prompt number {n}"} for n in range(8200)])
    report = dry_run(path, tmp_path / "ds", shard_options(clips="text", workers=1))
    assert (report.num_samples, report.num_shards) == (8200, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolution": ("256px",), "num_frames": (1,)}, "buckets cannot be combined with clips.kind='text'"),
        ({"fps": 24}, "clips.fps cannot be combined with clips.kind='text'"),
        ({"codec": "h264"}, "codec='h264' cannot be combined with clips.kind='text', which has no files"),
        ({"video_column": "v"}, "video_column='v' cannot be combined with clips.kind='text'"),
        ({"caption_column": ""}, "clips.kind='text' requires captions from metadata"),
        ({"media": {"control": "c"}}, "media=.* cannot be combined with clips.kind='text'"),
    ],
)
def test_options_for_videos_are_refused_for_texts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard_options(clips="text", **options)


def test_metadata_without_videos_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """A misspelled video column never silently becomes a dataset of texts."""
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}])
    with pytest.raises(
        SourceError, match="for a dataset of captions without videos, use clips.kind='text' .--clips text."
    ):
        built(path, tmp_path / "ds")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SourceError, match="has no metadata"):
        shard(tmp_path / "folder", tmp_path / "ds", shard_options(clips="text"))
