"""Records of received batches as plain values, datasets to read, and a program that runs one rank in its own process.

    python -m tests.loader.s3_run ORDER

ORDER is a JSON object. It contains the loader's `dataset` (or a list of datasets), its `options`, `world` as [rank,
ranks], and the file `out` for the received batches and the statistics. The statement `then` is executed after `after`
batches. The program prints one line when the loader has been created and one line per batch.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamvid
from tests.conftest import merged
from tests.shard_options import shard_options

if TYPE_CHECKING:
    from tests.servers import S3Server


USUAL: dict[str, Any] = {"num_workers": 0, "limits": {"prefetch_bytes": 1 << 22}}


@dataclass(frozen=True)
class Source:
    """Dataset on disk and its copy in a bucket."""

    root: Path
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def uploaded(root: Path, server: S3Server) -> Source:
    """Upload a dataset to a new bucket and return both locations."""
    source = Source(root, server.new_bucket(), "some/dataset")
    server.upload_folder(root, source.bucket, f"{source.prefix}/")
    return source


def make_sources(folder: Path, server: S3Server) -> dict[str, Source]:
    """Build two datasets and upload them.

    plain: 23 samples in two buckets and five shards, without packet indices.
    native: 6 clips, with packet indices.
    """
    from streamvid.buckets.bucket import parse_buckets
    from streamvid.sharder.sharder import shard
    from tests.clips import encode, frames_of
    from tests.loader.conftest import SMALL, TALL, build_dataset

    build_dataset(folder / "plain", {SMALL: [5, 4, 3], TALL: [6, 5]})
    (folder / "clips").mkdir()
    for number, name in enumerate(("bikes", "carphone_pristine", "bigbuckbunny") * 2):
        frames = frames_of(name, 96, 64, 14 + number)[number:]
        (folder / "clips" / f"{number}.mp4").write_bytes(encode(frames))
    options = shard_options(buckets=parse_buckets("96x64@5"), clips="native", shard_size_bytes=20_000, workers=1)
    shard(folder / "clips", folder / "native", options)
    return {name: uploaded(folder / name, server) for name in ("plain", "native")}


def received(batch: streamvid.Batch) -> list[Any]:
    """Return all values of a batch, with its pixels or clips reduced to a checksum of all bytes."""
    digest = hashlib.sha256()
    if "video" in batch:
        digest.update(batch.video.permute(0, 2, 3, 4, 1).contiguous().numpy().tobytes())
    else:
        for clip in batch.clips:
            digest.update(json.dumps([clip.start, clip.num_frames, clip.stream_json, len(clip.data)]).encode())
            digest.update(clip.data.numpy().tobytes())
            digest.update(b"" if clip.packets is None else clip.packets.numpy().tobytes())
    samples = [list(batch.sample_keys), list(batch.text), batch.is_repeat.tolist(), list(map(str, batch.fps.tolist()))]
    return [batch.bucket.id, *samples, batch.loss_weight, digest.hexdigest()]


def all_of(loader: streamvid.VideoLoader) -> list[list[Any]]:
    """Return the plain values of all batches from one loop over the loader."""
    return [received(batch) for batch in loader]


def run(dataset: Any, *, state: dict[str, Any] | None = None, **options: Any) -> list[list[Any]]:
    """Return the plain values of all batches from a new loader, which resumes from `state` if given."""
    with streamvid.VideoLoader(dataset, **merged(USUAL, options)) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return all_of(loader)


def start(**order: Any) -> subprocess.Popen[str]:
    """Start a process that executes an ORDER."""
    command = [sys.executable, "-W", "error", "-m", "tests.loader.s3_run", json.dumps(order, default=str)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], text=True, **pipes)


def read_results(out: Path) -> Any:
    """Return the received batches and the loader statistics that a process from `start` has written."""
    return json.loads(out.read_text())


def check_processes(source: Source, folder: Path, num_ranks: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run all ranks as concurrent processes and compare their batches with a read from disk.

    Return their statistics.
    """
    ranks = [
        start(dataset=source.url, world=[rank, num_ranks], options=options, out=folder / str(rank))
        for rank in range(num_ranks)
    ]
    own = {name: value for name, value in options.items() if name not in ("num_workers", "storage")}
    found = []
    for rank, process in enumerate(ranks):
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        got, stats = read_results(folder / str(rank))
        assert got == run(source.root, **own, world=streamvid.World(rank, num_ranks))
        found.append(stats)
    return found


def timed(batches: Iterator[Any], waits: list[float]) -> Iterator[Any]:
    """Yield the batches. Append the seconds waited for each batch, and for the end or an error, to `waits`."""
    while True:
        since = time.monotonic()
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            waits.append(time.monotonic() - since)
        yield batch


def main() -> None:
    order = json.loads(sys.argv[1])
    options = merged(USUAL, order.get("options", {}))
    if "world" in order:
        options["world"] = streamvid.World(*order["world"])
    with streamvid.VideoLoader(order["dataset"], **options) as loader:
        print("made", *loader.worker_pids, flush=True)
        got = []
        for number, batch in enumerate(loader, 1):
            got.append(received(batch))
            print("batch", number, *loader.worker_pids, flush=True)
            if number == order.get("after"):
                exec(order["then"])
        if "out" in order:
            Path(order["out"]).write_text(json.dumps([got, loader.stats().to_json()]))


if __name__ == "__main__":
    main()
