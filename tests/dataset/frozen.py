"""Frozen datasets of format 1 in tests/data/frozen, and the values compared with tests/data/frozen/expected.json.

`python -m tests.dataset.frozen` rebuilds them. Do so only when the format itself changes; from release 0.1.0 on, every
such change has a new version number. The files are the reference, not this script: their bytes depend on the versions
of FFmpeg and pyarrow, and x264 does not write the same bytes for a constant matte in every run.

copy      copied clips and an image in three buckets of an Open-Sora bucket config, drawn from several buckets, read at
          12 frames per second; several captions, an optional control video and mask, a condition, three rejections;
          then columns and a caption added by `annotate`
native    native clips of 96x64@5 and one image of 96x64@1, with a packet index
text      captions without pictures, in two splits
features  tensors of two visits of each sample of `native`
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import streamvid
from streamvid.dataset.features.sidecar import open_sidecar
from streamvid.dataset.features.tensors import RawTensor
from streamvid.dataset.features.writer import SidecarWriter
from tests.clips import encode, frames_of
from tests.files import tree_of, write_rows
from tests.media_clips import clip_of, picture_of, png_of
from tools import make_corpus

FROZEN = Path(__file__).resolve().parents[1] / "data" / "frozen"
EXPECTED = FROZEN / "expected.json"
DATASETS = ("copy", "native", "text")
NUM_EPOCHS = 3
BATCHES_BEFORE_STATE = 5
VISITS = 2
FORM = {"64px": {1: [1.0, 1], 5: [0.5, 1], 9: [0.75, 1]}, "80px": {5: [0.5, 1]}}
PACKETS = ("packets_offset", "packets_bytes", "packets_sha256")


def loader(name: str, **options: Any) -> streamvid.VideoLoader:
    """Return a loader of three epochs that delivers clips as they are stored."""
    fixed = {"batch_size": 1, "num_epochs": NUM_EPOCHS, "num_workers": 0, "seed": 3, "output": {"decode": False}}
    return streamvid.VideoLoader(FROZEN / name, **fixed | options)


# Compared values.


def tree_of_newest(root: Path) -> dict[str, bytes]:
    """Return the files of the newest version of a dataset by path."""
    return {path: data for path, data in tree_of(root).items() if not path.startswith("versions/")}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def plain(value: Any) -> Any:
    """Return the value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=lambda one: one.hex() if isinstance(one, bytes) else str(one)))


def facts(name: str) -> Any:
    """Return the contents of a dataset's manifest and index."""
    dataset = streamvid.open_dataset(FROZEN / name)
    return plain(
        {
            "manifest": json.loads((FROZEN / name / "manifest.json").read_bytes()),
            "shards": dataset.shards_table().to_pylist(),
            "samples": dataset.samples_table().to_pylist(),
            "rejections": dataset.rejections_table().to_pylist(),
            "packets": packets(dataset),
        }
    )


def packets(dataset: streamvid.Dataset) -> dict[str, Any]:
    """Return the packet index of each clip by key, or None for a clip without one."""
    found: dict[str, Any] = {}
    for shard in dataset.shards:
        rows = dataset.samples(shard, ["key", *PACKETS]).to_pylist()
        place = [rows[0][name] for name in PACKETS]
        tables = None if None in place else dataset.packets(shard, *place)
        for number, row in enumerate(rows):
            clip = None if tables is None else tables.clip(number)
            found[row["key"]] = None if clip is None else {
                "stream": json.loads(clip.info.to_json()),
                "times": clip.times.tolist(),
                "offsets": clip.offsets.tolist(),
                "sizes": clip.sizes.tolist(),
                "flags": clip.flags.tolist(),
                "pieces": [[start, end, digest.hex()] for start, end, digest in clip.window(0, clip.num_frames).pieces],
            }  # fmt: skip
    return found


def stored_batches(name: str) -> list[Any]:
    """Return the bucket, keys, captions, rates, frames and a checksum of the stored bytes of each batch."""
    found = []
    with loader(name) as batches:
        for batch in batches:
            delivered: list[Any] = [batch.bucket.id, batch.sample_keys, batch.text]
            if name != "text":
                (clip,) = batch.clips
                numbers = None if clip.numbers is None else list(clip.numbers)
                rate = [round(value, 6) for value in batch.fps.tolist()]
                delivered += [rate, clip.start, numbers, sha256(clip.data.numpy().tobytes())]
            found.append(delivered)
    return found


def decoded_batches() -> list[Any]:
    """Return the keys and a checksum of the RGB of each batch of native videos, converted from H.264 in integer
    arithmetic."""
    with loader("native", output={"decode": True, "pixels": "yuv420p", "layout": "BTHWC"}) as batches:
        return [
            [batch.sample_keys, sha256(batch.video.numpy().tobytes())]
            for batch in batches
            if batch.bucket.num_frames > 1
        ]


def features() -> Any:
    """Return the manifest and all members of the features."""
    sidecar, found = open_sidecar(FROZEN / "features"), {}
    for base in streamvid.open_dataset(FROZEN / "native").shards:
        shard, members = sidecar.shard(base), sidecar.members(base)
        data = (FROZEN / "features" / shard.path).read_bytes()
        for row in range(base.num_samples):
            for visit in range(VISITS):
                offset, num_bytes, digest = members.place(row, visit) or (0, 0, b"")
                assert hashlib.sha256(data[offset : offset + num_bytes]).digest() == digest
                tensors = sidecar.tensors(data[offset : offset + num_bytes], "frozen")
                found[f"{shard.path} {row} {visit}"] = {
                    name: [one.dtype, list(one.shape), bytes(one.data).hex()] for name, one in sorted(tensors.items())
                }
    return {"manifest": json.loads((FROZEN / "features" / "manifest.json").read_bytes()), "members": found}


def state_after(name: str, num_batches: int) -> dict[str, Any]:
    with loader(name) as batches:
        iterator = iter(batches)
        for _ in range(num_batches):
            next(iterator)
        return batches.state_dict()


def observed() -> dict[str, Any]:
    """Return the current values of everything that expected.json holds."""
    return plain(
        {
            "facts": {name: facts(name) for name in DATASETS},
            "batches": {name: stored_batches(name) for name in DATASETS},
            "decoded": decoded_batches(),
            "features": features(),
            "states": {name: state_after(name, BATCHES_BEFORE_STATE) for name in DATASETS},
        }
    )


# Building the datasets.


def streamvid_command(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "streamvid", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def small(frames: Any, **options: Any) -> bytes:
    return encode(frames, options={"g": "6", "bf": "2", "crf": "34", "preset": "veryfast"}, **options)


def make_copy(folder: Path) -> None:
    for name, clip, count, fps in (("a", "bikes", 12, 24), ("b", "bigbuckbunny", 15, 30), ("c", "bikes", 19, 12)):
        frames = frames_of(clip, 96, 64, count)
        (folder / f"{name}.mp4").write_bytes(small(frames, fps=fps))
        if name != "c":
            (folder / f"{name}-control.mp4").write_bytes(small(frames[:, ::2, ::2], fps=fps, numbered=False))
        matte = frames * 0 + 255
        (folder / f"{name}-matte.mp4").write_bytes(small(matte, fps=fps, numbered=False))
    picture = frames_of("bikes", 96, 64, 30)[29]
    (folder / "d.jpg").write_bytes(picture_of(picture))
    (folder / "d-control.png").write_bytes(png_of(picture[::2, ::2]))
    (folder / "d-matte.png").write_bytes(png_of(picture * 0 + 255))
    (folder / "broken.mp4").write_bytes(b"not a video" * 99)
    rows: list[dict[str, Any]] = [
        {"video": "a.mp4", "caption": ["one", "two"], "control": "a-control.mp4", "matte": "a-matte.mp4"},
        {
            "video": "b.mp4",
            "caption": [{"text": "often", "weight": 3}, {"text": "rarely", "weight": 0.5}],
            "control": "b-control.mp4",
            "matte": "b-matte.mp4",
        },
        {"video": "c.mp4", "caption": "alone", "control": None, "matte": "c-matte.mp4"},
        {"video": "d.jpg", "caption": None, "control": "d-control.png", "matte": "d-matte.png"},
        {"video": "broken.mp4", "caption": "x", "control": None, "matte": "a-matte.mp4"},
        {"video": "missing.mp4", "caption": "y", "control": None, "matte": "a-matte.mp4"},
        {"video": "a.mp4", "caption": "z", "control": None, "matte": "a-matte.mp4", "aesthetic": 0.5},
    ]
    kinds = [{"place": "Paris", "year": 2020, "is_day": True}, {"place": None, "year": 2021, "is_day": False}]
    rows = [{"aesthetic": 4 + number / 4, **kinds[number % 2], **row} for number, row in enumerate(rows)]
    (folder / "form.yaml").write_text(json.dumps({"bucket_config": FORM, "probabilities": "opensora-v2"}))
    streamvid_command(
        *("shard", write_rows(folder / "metadata.jsonl", rows), FROZEN / "copy", "--workers", 1),
        *("--bucket-config", folder / "form.yaml", "--assign", "all", "--fps", 12, "--shard-size", 14000),
        *("--media", "control?=control", "--media", "mask:matte=matte", "--where", "aesthetic > 1", "--whole-files"),
    )
    later = [
        {"source": "a.mp4", "motion": 1.5, "caption": "a later caption"},
        {"source": "c.mp4", "motion": 3.5, "aesthetic": 9.0},
    ]
    streamvid_command("annotate", FROZEN / "copy", write_rows(folder / "later.jsonl", later), "--overwrite")


def make_native(folder: Path) -> None:
    rows = []
    for name, clip, count in (("a.mp4", "bikes", 10), ("b.mkv", "bigbuckbunny", 13), ("c.mp4", "bikes", 19)):
        container = "matroska" if name.endswith(".mkv") else "mp4"
        (folder / name).write_bytes(encode(frames_of(clip, 192, 128, count), container=container))
        rows.append({"video": name, "caption": f"a clip of {clip}", "score": count / 2})
    picture = frames_of("bikes", 192, 128, 30)[29].copy()
    make_corpus.burn_number(picture, 29)
    (folder / "d.jpg").write_bytes(clip_of(picture[None], "image2pipe", codec="mjpeg", options={"strict": "-1"}))
    (folder / "broken.mp4").write_bytes(b"not a video" * 99)
    rows += [{"video": name, "caption": None, "score": None} for name in ("d.jpg", "broken.mp4")]
    streamvid_command(
        *("shard", write_rows(folder / "metadata.jsonl", rows), FROZEN / "native", "--workers", 1),
        *("--clips", "native", "--crf", 32, "--buckets", "96x64@5,96x64@1", "--shard-size", 12000),
    )


def make_text(folder: Path) -> None:
    rows = [{"caption": f"prompt {number % 9}", "rank": number} for number in range(12)] + [{"caption": " ", "rank": 0}]
    streamvid_command(
        *("shard", write_rows(folder / "metadata.jsonl", rows), FROZEN / "text", "--workers", 1),
        *("--clips", "text", "--val-fraction", 0.3),
    )


def make_features() -> None:
    dataset = streamvid.open_dataset(FROZEN / "native")
    made_with = {"factory": "tests:frozen", "view": {"temporal": "head", "seed": 0}}
    writer = SidecarWriter(FROZEN / "features", dataset, made_with, VISITS)

    def tensors(key: str, visit: int) -> dict[str, RawTensor]:
        data = hashlib.sha256(f"{key} {visit}".encode()).digest()
        return {
            "latents": RawTensor("BF16", (2, 4), data[:16]),
            "tokens": RawTensor("F32", (1 + data[0] % 4, 2), (data * 4)[: 8 * (1 + data[0] % 4)], is_ragged=True),
        }

    def samples(keys: list[str]) -> Iterator[tuple[str, list[dict[str, RawTensor]]]]:
        for key in keys:
            yield key, [tensors(key, visit) for visit in range(VISITS)]

    for shard in dataset.shards:
        writer.write_shard(shard, samples(dataset.samples(shard, ["key"]).column("key").to_pylist()))
    writer.seal({"tokens": RawTensor("F32", (1, 2), bytes(8))})


def main() -> None:
    shutil.rmtree(FROZEN, ignore_errors=True)
    for make in (make_copy, make_native, make_text):
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
    make_features()
    EXPECTED.write_text(json.dumps(observed(), indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
