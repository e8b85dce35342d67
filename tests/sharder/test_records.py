"""Tests of records from folders and metadata files, including broken ones."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamvid.buckets.bucket import parse_buckets
from streamvid.errors import SourceError
from streamvid.sharder.source.records import RecordSet, read_records
from tests.files import write_rows
from tests.shard_options import shard_options

BUCKETS = parse_buckets("96x64@9")


def read(source: Path, **changes: Any) -> RecordSet:
    return read_records(source, shard_options(**{"buckets": BUCKETS, "whole_files": True, **changes}))


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"media")


def reasons(records: RecordSet) -> dict[int, str]:
    return {rejection.row: rejection.reason for rejection in records.rejections}


def test_a_folder_is_read_in_order_with_captions_from_text_files(tmp_path: Path) -> None:
    touch(tmp_path, "b.mp4", "a/z.MKV", "a.mp4", "a/notes.md", ".hidden/x.mp4", ".x.mp4", "a-b/c.png")
    (tmp_path / "a" / "z.txt").write_bytes("\ufeff  ein Fahrrad\r\n".encode())
    records = read(tmp_path)
    assert [(r.row, r.source, r.caption) for r in records.records] == [
        (0, "a/z.MKV", "ein Fahrrad"), (1, "a-b/c.png", None), (2, "a.mp4", None), (3, "b.mp4", None),
    ]  # fmt: skip
    assert records.user_types == {}


def test_entries_that_are_only_named_like_media_are_rejected(tmp_path: Path) -> None:
    """SHARD-3, SAFE-1: pipes, devices, folders, loops and huge files are rejected, and nothing hangs."""
    touch(tmp_path, "good.mp4")
    os.mkfifo(tmp_path / "pipe.mp4")
    touch(tmp_path, "folder.mp4/inside.mp4")
    (tmp_path / "zero.mp4").symlink_to("/dev/zero")
    (tmp_path / "loop.mp4").symlink_to("loop.mp4")
    (tmp_path / "gone.mp4").symlink_to("nowhere")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "empty.mp4").touch()
    with (tmp_path / "sparse.mp4").open("wb") as file:
        file.truncate(2**40)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.mp4")).write_bytes(b"x")
    os.mkfifo(tmp_path / "good.txt")
    records = read(tmp_path)
    assert [record.source for record in records.records] == ["folder.mp4/inside.mp4", "good.mp4"]
    rejected = {rejection.source: rejection.reason for rejection in records.rejections}
    assert rejected["pipe.mp4"] == rejected["zero.mp4"] == "is not a regular file"
    assert rejected["folder.mp4"] == "is a folder"
    assert "symbolic links" in rejected["loop.mp4"]
    assert "No such file" in rejected["gone.mp4"]
    assert rejected["empty.mp4"] == "the file is empty"
    assert "max_clip_bytes" in rejected["sparse.mp4"]
    assert rejected["bad\\udcff.mp4"] == "the path is not valid UTF-8"
    assert records.num_rows == 10


@pytest.mark.parametrize(
    ("given_path", "reason"),
    [
        ("../x.mp4", "points outside the source folder"),
        ("a/../../x.mp4", "points outside the source folder"),
        ("..", "points outside the source folder"),
        ("", "the path is missing"),
        (None, "the path is missing"),
        (float("nan"), "the path is missing"),
        (7, "the path has type int; it must be text"),
        (["a.mp4"], "the path has type list; it must be text"),
        ("a\0.mp4", "NUL"),
        ("a" * 5000, "5000 characters"),
        ("\ud800.mp4", "not valid UTF-8"),
        ("https://user:secret@host/x.mp4?token=secret", "contains credentials"),
        ("gs://bucket/x.mp4", "starts with gs://, but"),
        ("s3://bucket", "not a valid object URL"),
        ("s3://user:secret@bucket/x.mp4", "contains credentials"),
        ("s3://bucket/../x.mp4", "is not allowed"),
        *(("file://host/x.mp4", "contains a host"), ("file://[clips]/x.mp4", "contains a host")),
        ("file:///%00", "NUL"),
        ("/dev/null", "not a regular file"),
        (".", "is a folder"),
    ],
)
def test_paths_that_are_rejected(tmp_path: Path, given_path: Any, reason: str) -> None:
    """SAFE-1."""
    (tmp_path / "m.jsonl").write_text(json.dumps({"path": given_path, "caption": "x"}))
    (rejection,) = read(tmp_path / "m.jsonl").rejections
    assert reason in rejection.reason
    assert "secret" not in rejection.source + rejection.reason


def test_paths_that_are_accepted(tmp_path: Path) -> None:
    touch(tmp_path, "in/a b.mp4", "out.mp4")
    inside, outside = tmp_path / "in" / "a b.mp4", tmp_path / "out.mp4"
    rows = [{"path": path} for path in ("a b.mp4", "./x/../a b.mp4", str(inside), inside.as_uri(), str(outside))]
    (tmp_path / "in" / "metadata.json").write_text(json.dumps({"version": 1, "clips": rows}))
    records = read(tmp_path / "in").records
    assert [record.source for record in records] == ["a b.mp4"] * 4 + [str(outside)]
    assert {record.path for record in records[:4]} == {str(inside)}


def test_broken_rows_keep_their_numbers(tmp_path: Path) -> None:
    """SHARD-3."""
    touch(tmp_path, "a.mp4")
    lines = ['{"path": "a.mp4", "caption": "x"}', "{torn", '"text"', "", '{"caption": "no path"}', "[" * 100_000]
    lines += ['{"path": "a.mp4", "caption": [1]}', '{"path": "a.mp4", "caption": "' + "x" * 70_000 + '"}']
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    records = read(tmp_path / "m.jsonl")
    assert [record.row for record in records.records] == [0]
    found = reasons(records)
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert found[1].startswith("line 2 is not valid JSON")
    assert found[2] == "the row has type str; it must be an object"
    assert found[3] == "the path is missing"
    assert found[5].startswith("a caption has type int; it must be text")
    assert "bytes long, but at most 65536 are allowed" in found[6]


def test_broken_csv_rows(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4")
    (tmp_path / "m.csv").write_bytes(
        b'\xef\xbb\xbfpath,caption\r\na.mp4,"one, ""two""\r\nthree"\r\n\r\na.mp4\r\na.mp4,\xff\r\n'
    )
    records = read(tmp_path / "m.csv")
    assert [record.caption for record in records.records] == ['one, "two"\r\nthree']
    assert "line 5 has 1 fields, but the header has 2" in reasons(records)[1]
    assert reasons(records)[2] == "column 'caption' is not valid UTF-8"


def test_types_of_csv_columns(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4")
    header = "path,caption,whole,real,flag,mixed,code,none,huge"
    rows = ["a.mp4,12,1,1.5,true,1,007,,9999999999999999999", "a.mp4,,-2,nan,FALSE,x,008,,1", "a.mp4,x,,1e3,,,,,2"]
    (tmp_path / "m.csv").write_text("\n".join([header, *rows]))
    records = read(tmp_path / "m.csv")
    assert records.user_types == {
        "whole": "int64", "real": "double", "flag": "bool", "mixed": "string", "code": "string", "none": "string",
        "huge": "string",
    }  # fmt: skip
    assert [record.caption for record in records.records] == ["12", None, "x"]
    first, second, third = (record.columns for record in records.records)
    assert (first["whole"], first["real"], first["flag"], first["mixed"], first["code"]) == (1, 1.5, True, "1", "007")
    assert (second["whole"], second["real"], second["flag"], second["mixed"]) == (-2, None, False, "x")
    assert (third["whole"], third["real"], third["flag"], third["none"]) == (None, 1000.0, None, None)


def test_types_of_json_and_parquet_columns(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4")
    rows = [
        {"path": "a.mp4", "n": 1, "x": 1, "m": 1, "tags": ["b", "a"], "big": 2**70},
        {"path": "a.mp4", "n": 2, "x": 0.5, "m": "1", "tags": None, "big": 1},
        {"path": "a.mp4", "x": None, "m": True},
    ]
    (tmp_path / "m.json").write_text(json.dumps(rows))
    records = read(tmp_path / "m.json", caption_column="")
    assert records.user_types == {"n": "int64", "x": "double", "m": "string", "tags": "string", "big": "string"}
    assert records.records[0].columns == {"n": 1, "x": 1.0, "m": "1", "tags": '["b", "a"]', "big": str(2**70)}
    assert records.records[2].columns == {"n": None, "x": None, "m": "true", "tags": None, "big": None}
    pq.write_table(
        pa.table({"video": ["a.mp4"] * 2, "text": ["é", None], "s": [float("nan"), 2.0]}), tmp_path / "m.parquet"
    )
    records = read(tmp_path, metadata=tmp_path / "m.parquet")
    assert [(r.caption, r.columns) for r in records.records] == [("é", {"s": None}), (None, {"s": 2.0})]


def test_columns_are_found_or_listed(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4")
    write_rows(tmp_path / "metadata.csv", [{"Video": "a.mp4", "Prompt": "x", "where": "a.mp4", "say": "y"}])
    assert read(tmp_path).records[0].caption == "x"
    assert read(tmp_path, video_column="where", caption_column="say").records[0].caption == "y"
    with pytest.raises(SourceError, match=r"captions.column='no' is not a column.*Prompt, where, say"):
        read(tmp_path, caption_column="no")
    write_rows(tmp_path / "metadata.csv", [{"one": "a.mp4", "two": "x"}])
    with pytest.raises(SourceError, match=r"one of the usual names for source.video_column.*one, two"):
        read(tmp_path)
    with pytest.raises(SourceError, match="to omit captions, set source.captions.column=''"):
        read(tmp_path, video_column="one")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.txt", b"x", "the name must match one of"),
        ("m.json", b"{", "is not valid JSON"),
        ("m.json", b'{"a": 1}', "a list of objects"),
        ("m.json", b"3", "contains a value of type int, not a list"),
        ("m.jsonl", "{}".encode("utf-16"), "UTF-16"),
        ("m.parquet", b"PAR1 or not", "not a readable Parquet file"),
        ("m.csv", b"path,path\na,b\n", "duplicate column names"),
        ("m.csv", b"path,caption\n", "has no rows"),
        ("m.csv", b'path,caption\na,x\nb,"never closed\nc,y\n', "the row on line 3 opens a quote"),
        ("m.csv", b"", "has no rows"),
        ("m.jsonl", json.dumps({f"c{i}": 1 for i in range(1001)}).encode(), "1001 columns"),
        ("m.jsonl", b'{"path": "a", "a\\u0000b": 1}', "rename the column"),
    ],
)
def test_metadata_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read(tmp_path / name)


def test_two_metadata_files_are_ambiguous(tmp_path: Path) -> None:
    for name in ("metadata.csv", "metadata.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(SourceError, match="choose one with --metadata: metadata.csv, metadata.jsonl"):
        read(tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["path", "caption", "a", "b"]), VALUES | st.just("a.mp4"), max_size=4), min_size=1
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
def test_any_rows_are_counted_and_typed(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """SHARD-3: whatever the rows contain, each is a record or a rejection, and every value has its column's type."""
    touch(tmp_path, "a.mp4")
    (tmp_path / "m.jsonl").write_text("\n".join(json.dumps(row) for row in [{"path": "a.mp4", "caption": "x"}, *rows]))
    records = read(tmp_path / "m.jsonl")
    assert sorted([r.row for r in records.records] + list(reasons(records))) == list(range(len(rows) + 1))
    types = {"int64": int, "double": float, "bool": bool, "string": str}
    for record in records.records:
        assert record.columns.keys() == records.user_types.keys()
        for name, value in record.columns.items():
            assert value is None or type(value) is types[records.user_types[name]]
    assert records.sha256() == read(tmp_path / "m.jsonl").sha256()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(captions=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=50), min_size=1))
def test_captions_survive_csv(tmp_path: Path, captions: list[str]) -> None:
    touch(tmp_path, "a.mp4")
    write_rows(tmp_path / "metadata.csv", [{"path": "a.mp4", "caption": caption} for caption in captions])
    assert [record.caption or "" for record in read(tmp_path).records] == captions


KOALA = "['0:00:25.525', '0:00:30.530']"


@pytest.mark.parametrize(
    "columns",
    [
        *({"start": 1.0, "end": 2.5}, {"Start Time": "0:01", "End Time": "0:02"}, {"startFrame": 1, "endFrame": 9}),
        *({"start_sec": 1, "end_sec": 2}, {"clip_start": 0, "clip_end": 1}, {"start": 1, "duration": 2}),
        *({"timestamp": KOALA}, {"timestamp": f"[{KOALA}]"}, {"Segments": "[[0, 4], [7, 9]]"}),
        *({"from": 0, "to": 1.5}, {"in": "0:01", "out": "0:02"}, {"t0": 0, "t1": 1}, {"begin": 0, "finish": 1}),
        *({"time_range": "0:00-0:01"}, {"span": "12.5 - 20"}, {"clip_range": "00:00:01,000 --> 00:00:04,000"}),
        *({"segment": '{"start": 0, "end": 20}'}, {"range": "[0, 20]"}, {"time": "(1, 2)"}),
        {"Start_timestamp": "00:00:01.500", "End_timestamp": "00:00:04.000"},  # InternVid
        *({"t_start": 0, "t_end": 2}, {"span_start": 0, "span_end": 2}, {"onset": 0, "offset": 2.5}),
        *({"ss": "0:01", "to": "0:02"}, {"caption_start": 1, "caption_end": 2.5}, {"clips": "[[0.5, 2.0], [2, 3]]"}),
        *({"start_time": 10, "duration": 2.5}, {"start_time": 1, "length": 2.5}, {"first_frame": 0, "last_frame": 20}),
        *({"tstart": "0:01", "tend": "0:02"}, {"since": 1, "until": 2}, {"start_time": 1, "end_sec": 2}),
        *({"timestamp": 0.5, "duration": 2}, {"time": "0:01", "duration": "0:02"}, {"ts0": 0, "ts1": 2.5}),
        *(
            {"clip_offset": 0.5, "clip_duration": 2},
            {"start": 1, "dur": 2},
            {"starts": 1, "ends": 2},
            {"beginning": 0, "ending": 1.5},
        ),
        *(
            {"interval_s": "[0, 2]"},
            {"segment_times": "[1.0, 2.5]"},
            {"start_end_time": "[0, 4]"},
            {"scene_bounds": "1.5-3"},
            {"ts": "[0, 2]"},
        ),
        *({"window": "[0.5, 2.0]"}, {"trim": "(1, 2)"}, {"bounds": "1 - 3.5"}, {"subclips": "[[0, 4], [7, 9]]"}),
        *({"timestamp": "0.5, 2.0"}, {"span": "1 3.5"}, {"ts": "0:00:00.5-0:00:02"}, {"part": KOALA}),
        *(
            {"period": f"[{KOALA}]"},
            {"frames": '{"start": 0.5, "end": 2}'},
            {"cut_at": "00:00:01,000 --> 00:00:04,000"},
        ),
    ],
)
def test_time_ranges_are_refused_without_whole_files(tmp_path: Path, columns: dict[str, Any]) -> None:
    """Otherwise each row would be a sample of the whole film with the caption of one part."""
    touch(tmp_path, "film.mp4")
    write_rows(tmp_path / "metadata.csv", [{"video": "film.mp4", "caption": "a dog", **columns}])
    with pytest.raises(SourceError, match=rf"{next(iter(columns))}.* time ranges, so .*--time-columns.*--whole-files"):
        read(tmp_path, whole_files=False)
    assert len(read(tmp_path, whole_files=True).records) == 1


ONE, TWO = (Fraction("25.525"), Fraction("30.53")), (Fraction("61.5"), Fraction(3605))


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"timestamp": KOALA}, [ONE]),
        ({"timestamp": f"[{KOALA}, ('1:01.5', '1:00:05,000')]"}, [ONE, TWO]),
        ({"timestamp": "[[25.525, 30.53], [61.5, 3605]]"}, [ONE, TWO]),
        ({"start": "25.525", "end": "0:30.53"}, [ONE]),
        ({"start": "[25.525, 61.5]", "end": "[30.53, 3605.0]"}, [ONE, TWO]),
        ({"start": "", "end": ""}, [None]),
        ({"begin": "25.525", "clip duration": "5.005"}, [ONE]),
        ({"span": "0:25.525-0:30.53"}, [ONE]),
        ({"span": '["25.525 --> 30.53", "1:01.5 to 1:00:05"]'}, [ONE, TWO]),
        ({"span": '{"start_time": 25.525, "end_time": 30.53}'}, [ONE]),
        ({"span": '[{"from": 25.525, "to": 30.53}, {"t0": 61.5, "duration": 3543.5}]'}, [ONE, TWO]),
    ],
)
def test_each_time_range_becomes_a_record(
    tmp_path: Path, cells: dict[str, str], expected: list[tuple[Fraction, Fraction] | None]
) -> None:
    """Koala-36M stores one list, Panda-70M a list of ranges with as many captions, and other datasets two columns."""
    touch(tmp_path, "film.mp4")
    captions = ["a dog", "a cat"][: len(expected)]
    num_rows = 1 if expected == [None] else 2
    rows = [{"video": "film.mp4", "caption": json.dumps(captions), **cells, "score": 1}] * num_rows
    write_rows(tmp_path / "metadata.csv", rows)
    found = read(tmp_path, clips="native", time_columns=tuple(cells), whole_files=False)
    ranges = [record.time_range and (record.time_range.start, record.time_range.end) for record in found.records]
    assert ranges == expected * num_rows and [record.caption for record in found.records] == captions * num_rows
    assert (found.num_rows, found.rejections, set(found.user_types)) == (num_rows, (), {"score"})
    assert [record.row for record in found.records] == sorted([*range(num_rows)] * len(expected))


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"timestamp": "[[1, 2], [3, 4], [5, 6]]"}, "3 time ranges, but 2 captions"),
        ({"timestamp": "[[1, 2], [3, 4"}, "cannot be parsed; use a JSON or Python list"),
        ({"timestamp": "[" * 5000}, "cannot be parsed; use a JSON or Python list"),
        ({"timestamp": "[[1, 2, 3]]"}, "not a (start, end) pair"),
        ({"timestamp": "7"}, "'7' is not a (start, end) pair"),
        ({"timestamp": "[2, 1]"}, "2 to 1 s must end after it starts"),
        *(
            ({"start": text, "end": "9"}, "is invalid; use a number of seconds")
            for text in ("-1", "nan", "1e400", "1:2:3:4", "x")
        ),
        ({"start": "1", "end": ""}, "a start, end or duration is missing"),
        ({"start": "[1, 2]", "end": "[3]"}, "2 start times, but 1 end"),
    ],
)
def test_a_bad_time_range_is_a_rejection(tmp_path: Path, cells: dict[str, str], reason: str) -> None:
    touch(tmp_path, "film.mp4")
    write_rows(tmp_path / "metadata.csv", [{"video": "film.mp4", "caption": '["a", "b"]', **cells}])
    (rejection,) = read(tmp_path, clips="native", time_columns=tuple(cells), whole_files=False).rejections
    assert reason in rejection.reason and rejection.kind == "time-range"


def test_time_columns_must_exist(tmp_path: Path) -> None:
    touch(tmp_path, "film.mp4")
    chosen = {"clips": "native", "whole_files": False, "time_columns": ("start", "end")}
    with pytest.raises(SourceError, match="has no metadata, but source.time_columns"):
        read(tmp_path, **chosen)
    write_rows(tmp_path / "metadata.csv", [{"video": "film.mp4", "caption": "a", "begin": 1, "end": 2}])
    with pytest.raises(SourceError, match="time_columns='start' is not a column"):
        read(tmp_path, **chosen)


@pytest.mark.parametrize(
    "columns",
    [
        *(
            {"timestamp": "2024-05-01T12:00:00"},
            {"timestamp": 1714564800},
            {"start": 1},
            {"backend": "a", "restart": 1},
        ),
        *({"from": "Paris", "to": "Rome"}, {"in": 3, "out": 1}, {"span": 4}, {"range": "a-b"}, {"time": "2020-01-02"}),
        *({"clips": "['a.mp4', 'b.mp4']"}, {"scene": "a park"}, {"mood_start": "sad", "mood_end": "glad"}),
        *({"size": "[640, 800]"}, {"shape": "16:9"}, {"boxes": "[[1, 2, 3, 4]]"}, {"daytime": "12:30:15"}),
        *({"timestamp": 1714564800, "duration": 12.5}, {"time": "2020-01-02", "duration": 3}, {"fps_range": "[8, 30]"}),
        *({"length": 12.5, "fps": 25}, {"first_name": "Ann", "last_name": "Lee"}, {"crop": '{"left": 1, "right": 2}'}),
    ],
)
def test_other_columns_about_time_are_not_ranges(tmp_path: Path, columns: dict[str, Any]) -> None:
    touch(tmp_path, "film.mp4")
    write_rows(tmp_path / "metadata.csv", [{"video": "film.mp4", "caption": "a dog", **columns}])
    assert set(read(tmp_path, whole_files=False).user_types) == set(columns)


def test_rows_that_share_a_file_are_refused_without_whole_files(tmp_path: Path) -> None:
    touch(tmp_path, "film.mp4", "other.mp4")
    rows = [
        {"video": name, "caption": str(number)} for number, name in enumerate(("film.mp4", "other.mp4", "film.mp4"))
    ]
    write_rows(tmp_path / "metadata.jsonl", rows)
    with pytest.raises(SourceError, match=r"some rows \(1 in total\) use .* rows 0 and 2 use film.mp4.*--whole-files"):
        read(tmp_path, whole_files=False)
    assert len(read(tmp_path).records) == 3
