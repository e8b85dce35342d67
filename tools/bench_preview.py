"""Time to the first pages of a preview, and its memory, for a dataset with many synthetic rows.

    python -m tools.bench_preview --rows 200000 --json

Each page is requested over a new connection, the first page immediately after the server printed its address.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.index import ClipEntry, RowGroup, SampleRow, SourceEntry, encode_samples
from streamvid.dataset.manifest import FileInfo, ShardInfo, manifest_to_json
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.storage import LocalStore
from tools.synthetic_dataset import put_file, put_index

BUCKETS = (Bucket(81, 480, 832, "480p", "16:9"), Bucket(17, 256, 256), Bucket(1, 480, 832))
ROWS_PER_SHARD, SHARDS_PER_FILE = 500, 200
PAGES = {
    "overview": "/",
    "samples": "/samples",
    "distributions": "/figures",
    "filtered": "/samples?where=fps+%3E+24+and+contains(text%2C+%22street%22)",
    "sorted": "/samples?sort=duration_seconds&desc=1",
    "far": "/samples?from=150000",
    "step": "/step?ranks=64&batch=4",
}
_CLIP = ClipEntry("mp4", 512, 400_000, bytes(32), 200, 1280, 720, 24.0, 8.0, "h264")


def row_of(number: int, index: int) -> SampleRow:
    """Return a row whose values look like those of a real dataset."""
    digest = hashlib.sha256(str(number).encode())
    a, b, c = digest.digest()[:3]
    clip = replace(
        _CLIP,
        num_bytes=100_000 + a * 4000,
        sha256=digest.digest(),
        fps=(24.0, 25.0, 29.97, 30.0)[b % 4],
        duration_seconds=2 + a / 16,
    )
    place = ("street", "meadow", "kitchen", "harbour")[c % 4]
    return SampleRow(
        key=f"clip_{number}-{digest.hexdigest()[:16]}",
        record_key=f"clip_{number // 2}-{digest.hexdigest()[16:32]}",
        index=index,
        text=f"Shot {number} of a {place} in the early morning, seen from a window, with people who pass by.",
        clip=clip,
        source=SourceEntry(f"videos/{place}/{number:07d}.mp4", 1280, 720, 4_000_000, 0, 200, b / 1000, 0.65),
        columns={"aesthetic": 3 + c / 64, "motion": a / 10, "place": place},
    )


def seal(root: Path, num_rows: int) -> None:
    """Write a sealed dataset without tars."""
    store, types = LocalStore(root), {"aesthetic": "double", "motion": "double", "place": "string"}
    shards: list[ShardInfo] = []
    files: list[FileInfo] = []
    starts = list(range(0, num_rows, ROWS_PER_SHARD))
    numbers = [0] * len(BUCKETS)
    places = sorted((number % len(BUCKETS), start) for number, start in enumerate(starts))
    for first in range(0, len(places), SHARDS_PER_FILE):
        groups = []
        for place, start in places[first : first + SHARDS_PER_FILE]:
            rows = [row_of(n, n - start) for n in range(start, min(num_rows, start + ROWS_PER_SHARD))]
            groups.append(RowGroup(BUCKETS[place].id, numbers[place], "train", rows))
            numbers[place] += 1
        files.append(put_file(store, "samples", len(files), encode_samples(groups, types)))
        for place, group in enumerate(groups):
            shards.append(_shard(group, files[-1].path, place))
    store.put(MANIFEST, manifest_to_json(put_index(store, BUCKETS, shards, files)))


def _shard(group: RowGroup, path: str, place: int) -> ShardInfo:
    num_bytes = 10_240 * (1 + sum(row.clip.num_bytes + 1536 for row in group.rows) // 10_240)
    largest = max(row.clip.num_bytes for row in group.rows)
    digest, count = "0" * 64, len(group.rows)
    return ShardInfo(
        group.bucket_id, group.number, 0, "train", count, num_bytes, digest, 8, digest, largest, path, place
    )


@contextmanager
def serving(root: Path) -> Iterator[tuple[str, int]]:
    """Run a preview server. Yield its network location and its process id."""
    command = [sys.executable, "-m", "streamvid", "--quiet", "preview", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield urlsplit(process.stdout.readline().strip()).netloc, process.pid
        finally:
            process.terminate()


def seconds_of(location: str, path: str) -> float:
    """Request a page, and return the seconds until the last byte arrived."""
    since = time.perf_counter()
    connection = http.client.HTTPConnection(location, timeout=120)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body[:2000]
    connection.close()
    return time.perf_counter() - since


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children."""
    process = Path(f"/proc/{pid}")
    (line,) = (line for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS:"))
    children = " ".join(path.read_text() for path in process.glob("task/*/children"))
    return int(line.split()[1]) * 1024 + sum(resident_bytes(int(child)) for child in children.split())


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class PageFigures:
    """Medians for one page over new servers: wall and CPU seconds of the request, and resident memory afterwards."""

    seconds: float
    cpu_seconds: float
    resident_mb_after: float


def measure(root: Path, repeats: int) -> dict[str, PageFigures]:
    """Request all pages in turn from new servers. "start" is the time from the command to the printed address."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(repeats):
        since = time.perf_counter()
        with serving(root) as (location, pid):
            before = cpu_seconds(pid)
            found.setdefault("start", []).append((time.perf_counter() - since, before, resident_bytes(pid) / 1e6))
            for name, path in PAGES.items():
                seconds, after = seconds_of(location, path), cpu_seconds(pid)
                found.setdefault(name, []).append((seconds, after - before, resident_bytes(pid) / 1e6))
                before = after
    return {name: PageFigures(*map(statistics.median, zip(*rows, strict=True))) for name, rows in found.items()}


def main() -> None:
    """Measure, and print the results as a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="folder in which to keep the dataset for the next run")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = given.dir or Path(scratch) / "ds"
        if not (root / MANIFEST).exists():
            seal(root, given.rows)
        found = measure(root, given.repeats)
    if given.json:
        pages = {name: asdict(one) for name, one in found.items()}
        print(json.dumps({"rows": given.rows, "repeats": given.repeats, "pages": pages}))
        return
    for name, one in found.items():
        print(f"{name:<14} {one.seconds:6.2f} s {one.cpu_seconds:6.2f} s CPU {one.resident_mb_after:6.0f} MB resident")


if __name__ == "__main__":
    main()
