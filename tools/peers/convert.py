"""One bucket of a streamvid dataset in each peer's own format, for tools/peers/loader.py; not part of what is timed.

    .peers/bin/python -m tools.peers.convert DATASET OUT [--bucket ID] [--chunk-bytes N]    (from the checkout's root)

OUT gets files/ (a file a clip), webdataset/ (links to the tars), energon/ (links, and Energon's own files), litdata/,
mosaic/, datasets/ (Arrow), each with the same clips, and convert.json: {"num_samples", "num_bytes", "bucket",
"missing": {method: why}}. Chunks are as large as the tars are on average, so that all share work among workers alike.
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.peers.clips import PeerError, stand_in_for_torchvision

NOT_CLIPS = frozenset({"json", "txt"})


@dataclass(frozen=True)
class Source:
    """The tars of one bucket, in order, and how large the peers' chunks are to be, in bytes."""

    dataset: Path
    tars: tuple[Path, ...]
    chunk_bytes: int

    def clips(self) -> Iterator[tuple[str, str, bytes]]:
        """(key, extension, bytes) of every clip."""
        for path in self.tars:
            with tarfile.open(path) as tar:
                for member in tar:
                    key, extension = Path(member.name).name.split(".", 1)
                    file = tar.extractfile(member)
                    if extension not in NOT_CLIPS and file is not None:
                        yield key, extension, file.read()


def to_files(source: Source, folder: Path) -> None:
    """A file a clip."""
    for number, (_, extension, data) in enumerate(source.clips()):
        (folder / f"{number:06d}.{extension}").write_bytes(data)


def to_webdataset(source: Source, folder: Path) -> None:
    """The tars are webdataset's format."""
    for path in source.tars:
        (folder / path.name).symlink_to(path)


def to_energon(source: Source, folder: Path) -> None:
    """The tars, their offsets, and a description that names these tars only."""
    counts: dict[str, int] = {}
    for path in source.tars:
        (folder / path.name).symlink_to(path)
        (folder / f"{path.name}.idx").symlink_to(f"{path}.idx")
        counts[path.name] = (path.parent / f"{path.name}.idx").stat().st_size // 8 - 1
    info = json.loads((source.dataset / ".nv-meta" / ".info.json").read_text())
    described = {
        ".info.json": {**info, "shard_counts": counts},
        "split.yaml": {"exclude": [], "split_parts": {"train": sorted(counts), "val": [], "test": []}},
        "dataset.yaml": {"__class__": "CrudeWebdataset", "__module__": "megatron.energon"},
    }
    (folder / ".nv-meta").mkdir()
    for name, value in described.items():
        (folder / ".nv-meta" / name).write_text(json.dumps(value))


def to_litdata(source: Source, folder: Path) -> None:
    """Chunks of pickled items, written by litdata's own cache in this process."""
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder), chunk_bytes=source.chunk_bytes)
    for number, (_, _, data) in enumerate(source.clips()):
        cache[number] = {"clip": data}
    cache.done()
    cache.merge()


def to_mosaic(source: Source, folder: Path) -> None:
    """MDS shards, not compressed."""
    stand_in_for_torchvision()
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"clip": "bytes"}, size_limit=source.chunk_bytes) as writer:
        for _, _, data in source.clips():
            writer.write({"clip": data})


def to_datasets(source: Source, folder: Path) -> None:
    """Arrow files with a column of bytes."""
    from datasets import Dataset, Features, Value

    features = Features({"clip": Value("large_binary")})
    rows = [{"clip": data} for _, _, data in source.clips()]
    Dataset.from_list(rows, features=features).save_to_disk(str(folder), num_shards=min(len(source.tars), len(rows)))


FORMATS: dict[str, Callable[[Source, Path], None]] = {
    "files": to_files,
    "webdataset": to_webdataset,
    "energon": to_energon,
    "litdata": to_litdata,
    "mosaic": to_mosaic,
    "datasets": to_datasets,
}


def find_source(dataset: Path, bucket: str | None, chunk_bytes: int | None) -> Source:
    """The bucket's tars. PeerError if there is no such bucket, or several and none is named."""
    buckets = sorted(path.name for path in (dataset / "shards").iterdir())
    chosen = bucket or (buckets[0] if len(buckets) == 1 else "")
    if chosen not in buckets:
        raise PeerError(f"bucket is {bucket!r}, the dataset has {buckets}: name one, batches have one size")
    tars = tuple(sorted(path.absolute() for path in (dataset / "shards" / chosen).glob("*.tar")))
    mean = sum(path.stat().st_size for path in tars) // len(tars)
    return Source(dataset.absolute(), tars, chunk_bytes or mean)


def convert(source: Source, out: Path) -> dict[str, object]:
    """Writes every format that can be written here; what convert.json holds."""
    out.mkdir(parents=True)
    missing = {}
    for name, write in FORMATS.items():
        (out / name).mkdir()
        try:
            write(source, out / name)
        except Exception as error:  # noqa: BLE001  # named in the table, never silently missing
            missing[name] = f"{type(error).__name__}: {error}"
    sizes = [len(data) for _, _, data in source.clips()]
    facts = {"num_samples": len(sizes), "num_bytes": sum(sizes), "bucket": source.tars[0].parent.name}
    found = {**facts, "missing": missing}
    (out / "convert.json").write_text(json.dumps(found))
    return found


def main() -> None:
    """Parse the command line, convert, print convert.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bucket", help="needed if the dataset has several")
    parser.add_argument("--chunk-bytes", type=int, help="as large as the tars on average if not given")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        source = find_source(options.dataset, options.bucket, options.chunk_bytes)
    except (OSError, PeerError) as error:
        parser.error(str(error))
    answers.write(json.dumps(convert(source, options.out)) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
