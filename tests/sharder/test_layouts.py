"""Tests that one command shards every source layout, and that the loader delivers each caption with its own frames."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from streamvid.buckets.bucket import parse_buckets
from streamvid.cli.main import cli
from streamvid.sharder.source.records import read_records
from streamvid.storage import StorageOptions
from streamvid.video.decode.file import decode_into
from tests.clips import encode, frames_of
from tests.loader.conftest import open_loader
from tests.shard_options import shard_options

BUCKETS = "96x64@9,64x64@1"
Pixels = NDArray[np.uint8]
Add = Callable[[str, bytes], None]


@cache
def clip(number: int) -> bytes:
    """Return one of several clips of 9 frames, all with different content."""
    name = ("bikes", "carphone_pristine", "bigbuckbunny")[number % 3]
    return encode(frames_of(name, 96, 64, 20)[number : number + 9])


def caption(number: int) -> str:
    return f'clip {number}, with "quotes" and é'


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def videos(folder: Path, count: int = 3, pattern: str = "videos/{}.mp4") -> list[str]:
    """Write clips to a folder and return their names."""
    names = [pattern.format(number) for number in range(count)]
    write(folder, {name: clip(number) for number, name in enumerate(names)})
    return names


def tar_of(members: Mapping[str, bytes], **options: Any) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", **options) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=2)
    return sink.getvalue()


def jsonl_of(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def csv_of(rows: list[dict[str, Any]]) -> bytes:
    sink = io.StringIO(newline="")
    writer = csv.DictWriter(sink, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


def shard(*arguments: object, buckets: str = BUCKETS) -> dict[str, Any]:
    """Run the command in this process and return its report; raise its errors."""
    asked = ["shard", *map(str, arguments), "--buckets", buckets, "--workers", "1", "--json"]
    done = CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def deliver(dataset: Path, **options: Any) -> dict[str, Pixels]:
    """Return everything that an epoch delivers: caption → frames (T, H, W, 3)."""
    found: dict[str, Pixels] = {}
    with open_loader(dataset, output={"layout": "BTHWC"}, tail="pad", **options) as loader:
        for batch in loader:
            assert batch.text[0] not in found
            found[batch.text[0]] = batch.video[0].numpy().copy()
    return found


def decoded(data: bytes, shape: tuple[int, int, int] = (9, 64, 96)) -> Pixels:
    out = np.zeros((*shape, 3), np.uint8)
    decode_into(data, 0, out)
    return out


def check(dataset: Path, count: int = 3) -> None:
    """Assert that each clip has its own caption and decodes to the same pixels as its file."""
    found = deliver(dataset)
    assert sorted(found) == sorted(caption(number) for number in range(count))
    for number in range(count):
        np.testing.assert_array_equal(found[caption(number)], decoded(clip(number)))


def rows_of(names: list[str], video: str = "path", text: str = "caption", **more: Any) -> list[dict[str, Any]]:
    return [{video: name, text: caption(number), "score": number / 4} for number, name in enumerate(names)]


def make_csv(folder: Path) -> list[object]:
    write(folder, {"metadata.csv": csv_of(rows_of(videos(folder)))})
    return [folder]


def make_json_of_videox(folder: Path) -> list[object]:
    rows = [{**row, "type": "video"} for row in rows_of(videos(folder), "file_path", "text")]
    write(folder, {"metadata.json": json.dumps(rows).encode()})
    return [folder]


def make_jsonl_file(folder: Path) -> list[object]:
    write(folder, {"train.jsonl": jsonl_of(rows_of(videos(folder), "media_path", "cap"))})
    return [folder / "train.jsonl"]


def make_parquet_file(folder: Path) -> list[object]:
    write(folder, {"rows.parquet": parquet_of(rows_of(videos(folder), "video", "prompt"))})
    return [folder / "rows.parquet"]


def make_parquet_folder(folder: Path) -> list[object]:
    rows = rows_of([str(folder / name) for name in videos(folder)], "video_path", "text")
    parts = {"meta/part-00000.parquet": rows[:2], "meta/part-00001.parquet": rows[2:]}
    write(folder, {name: parquet_of(part) for name, part in parts.items()})
    return [folder / "meta"]


def make_hugging_face(folder: Path) -> list[object]:
    """Write Parquet files as `datasets` does for its Video feature: structs, some of which only name a file."""
    rows = rows_of(videos(folder), "video")
    for number in (0, 1):
        rows[number]["video"] = {"bytes": clip(number), "path": "same.mp4"}
    rows[2]["video"] = {"bytes": None, "path": str(folder / "videos/2.mp4")}
    return [write(folder / "data", {"a/0.parquet": parquet_of(rows[:1]), "b/0.parquet": parquet_of(rows[1:])})]


def make_binary(folder: Path) -> list[object]:
    """Write a binary column with an unusual name."""
    rows = [row | {"mp4": clip(number)} for number, row in enumerate(rows_of(["x", "y", "z"], "id"))]
    return [write(folder, {"rows.parquet": parquet_of(rows)}) / "rows.parquet"]


def make_parquet_with_base(folder: Path) -> list[object]:
    rows = rows_of([name.removeprefix("videos/") for name in videos(folder)])
    write(folder, {"meta/a.parquet": parquet_of(rows[:1]), "meta/b.parquet": parquet_of(rows[1:])})
    return [folder / "meta", "--base-path", folder / "videos"]


def make_sidecars(folder: Path) -> list[object]:
    names = videos(folder, pattern="deep/{}.MP4")
    write(folder, {name.replace(".MP4", ".txt"): caption(number).encode() for number, name in enumerate(names)})
    return [folder]


def make_lists(folder: Path) -> list[object]:
    names = videos(folder)
    captions = "\n".join(caption(number) for number in range(3))
    write(folder, {"videos.txt": ("\n".join(names) + "\n\n").encode(), "prompt.txt": captions.encode()})
    return [folder]


def make_imagefolder(folder: Path) -> list[object]:
    rows = rows_of(videos(folder, pattern="train/{}.mp4"), "file_name", "text")
    for row in rows:
        row["file_name"] = row["file_name"].removeprefix("train/")
    write(folder, {"train/metadata.jsonl": jsonl_of(rows[:2]), "test/metadata.csv": csv_of(rows[2:])})
    (folder / "train" / "2.mp4").rename(folder / "test" / "2.mp4")
    return [folder]


def make_fastvideo(folder: Path) -> list[object]:
    names = [name.removeprefix("videos/") for name in videos(folder)]
    rows = [{"path": name, "cap": [caption(number)], "fps": 24} for number, name in enumerate(names)]
    write(folder, {"videos2caption.json": json.dumps(rows).encode()})
    return [folder]


def make_captions_json(folder: Path) -> list[object]:
    names = videos(folder)
    write(folder, {"captions.json": json.dumps({name: [caption(n)] for n, name in enumerate(names)}).encode()})
    return [folder]


def make_diffsynth(folder: Path) -> list[object]:
    names = [name.removeprefix("videos/") for name in videos(folder)]
    write(folder, {"meta/metadata.csv": csv_of(rows_of(names, "video", "prompt"))})
    return [folder / "meta" / "metadata.csv", "--base-path", folder / "videos"]


def make_webdataset(folder: Path) -> list[object]:
    parts = [
        {f"{n:03}.mp4": clip(n), f"{n:03}.txt": caption(n).encode(), f"{n:03}.json": b'{"score": 1.5}'}
        for n in range(3)
    ]
    write(folder, {"0.tar": tar_of({**parts[0], **parts[1]}), "deep/1.tar": tar_of(parts[2])})
    return [folder]


def make_one_tar(folder: Path) -> list[object]:
    """Write names with dots, long names and a folder, as plain tar does: GNU headers, and captions in JSON."""
    members = {f"./{'long name ' * 12}/clip_1.{n}s.mp4": clip(n) for n in range(3)} | {
        f"./{'long name ' * 12}/clip_1.{n}s.json": json.dumps({"caption": caption(n)}).encode() for n in range(3)
    }
    write(folder, {"all.tar": tar_of(members, format=tarfile.GNU_FORMAT)})
    return [folder / "all.tar"]


def make_video2dataset(folder: Path) -> list[object]:
    rows: list[dict[str, Any]] = [
        {"key": f"{n:09}", "url": f"http://x/{n}", "caption": caption(n), "status": "success", "error_message": None}
        for n in range(3)
    ]
    members = {}
    for n, row in enumerate(rows):
        members |= {
            f"{n:09}.mp4": clip(n),
            f"{n:09}.txt": caption(n).encode(),
            f"{n:09}.json": json.dumps(row).encode(),
        }
    rows.append({**rows[0], "key": "000000009", "status": "failed_to_download", "error_message": "404"})
    files = {"00000.tar": tar_of(members, format=tarfile.PAX_FORMAT), "00000.parquet": parquet_of(rows)}
    write(folder, {**files, "00000_stats.json": b'{"count": 4}'})
    return [folder]


def make_cosmos(folder: Path) -> list[object]:
    root = "v0/resolution_720/aspect_ratio_16_9/frames_0_255"
    metas = {
        f"u{n}.json": json.dumps({"nb_frames": 9, "t2w_windows": [{"start_frame": 0, "qwen_caption": caption(n)}]})
        for n in range(3)
    }
    write(folder, {
        f"{root}/video/part_000000/000000.tar": tar_of({f"u{n}.mp4": clip(n) for n in range(3)}),
        f"{root}/metas/part_000000/000000.tar": tar_of({name: text.encode() for name, text in metas.items()}),
        f"{root}/t5_xxl/part_000000/000000.tar": tar_of({f"u{n}.pickle": b"never opened" for n in range(3)}),
    })  # fmt: skip
    return [folder]


LAYOUTS = {name.removeprefix("make_"): make for name, make in list(globals().items()) if name.startswith("make_")}


# Variants that other layouts already cover; test_every_layout_yields_the_same_records reads all layouts.
_LIKE_OTHERS = (
    *("json_of_videox", "jsonl_file", "parquet_file", "parquet_with_base", "fastvideo", "captions_json", "diffsynth"),
    "one_tar",
)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if name in _LIKE_OTHERS else ()) for name in LAYOUTS]
)
def test_each_layout_becomes_a_dataset_in_one_command(layout: str, tmp_path: Path) -> None:
    """SHARD-3: captions stay with their own clips."""
    arguments = LAYOUTS[layout](tmp_path / "source")
    report = shard(*arguments[:1], tmp_path / "ds", *arguments[1:])
    expected = {"video2dataset": 1}
    assert (report["num_samples"], report["num_rejected"]) == (3, expected.get(layout, 0)), report["rejections"]
    check(tmp_path / "ds")
    again = shard(*arguments[:1], tmp_path / "ds", *arguments[1:])
    assert again["state"] == "already sealed"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_yields_the_same_records(layout: str, tmp_path: Path) -> None:
    """Every layout lists the same clips with the same captions before anything is built."""
    source, *flags = LAYOUTS[layout](tmp_path)
    options = shard_options(buckets=parse_buckets(BUCKETS), base_path=str(flags[1]) if flags else None)
    records = read_records(str(source), options, tmp_path / "embedded", extracts=True).records
    found = {record.caption: record.media(StorageOptions()).read() for record in records}
    assert found == {caption(number): clip(number) for number in range(3)}
    assert len({record.source for record in records}) == 3
