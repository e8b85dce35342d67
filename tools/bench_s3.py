"""Streaming from a real object store, compared with the bandwidth of the link and with other loaders.

    python -m tools.bench_s3 link  [--links 50:30,50:100,100:30,100:100] [--kinds 100KB,1MB] [--repeats 5] [--json]
    python -m tools.bench_s3 peers [--kinds 100KB,1MB] [--workers 2] [--repeats 5] [--json]    (first run `make peers`)

The store is Ceph RGW in memory on this machine (tools/ceph_rgw.sh). Clips are delivered as they are stored
(decode=False). Samples have about 100 KB or 1 MB. Every frame of a clip is delivered, so a sample is a whole clip. Each
run is a separate process. Within a repeat, runs are in random order. Results are medians over the repeats.

link: tools/fault_proxy.py limits all connections together to MB/s:ms, where ms is the delay before each response.
"useful" counts delivered bytes, and "all" counts bytes of bodies that passed through the proxy, both during --seconds
after a warm-up. With a cache, which is empty at first, they are counted over one epoch. "rank" is one of 64 ranks,
whose shard locality (batch size x 64) covers all samples of a step: together, they are --fill of the shuffle window.

peers: one epoch each, in processes that have done all imports, with empty caches. webdataset (curl, signed URLs),
mosaic streaming, litdata and Energon (MSC) read from S3 with their own clients, all in stored order, which is the
cheapest. "streamvid" also reads in stored order, and "shuffled" in its default order. CPU is that of the client,
including workers and their children. The proxy counts requests in a separate run that is not timed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench_memory import memory_of
from tools.bench_s3_data import Kind, kinds, make_dataset, rgw, upload
from tools.fault_proxy import FaultProxy
from tools.peers import client
from tools.peers.loader import cpu_seconds_of_tree
from tools.peers.s3 import METHODS as PEERS

ROOT = Path(__file__).resolve().parent.parent
RANKS, RANK = 64, 21
WARM_SECONDS = 4.0
Run = dict[str, Any]


# ---------------------------------------------------------------------------------------------- one run of ours


def run_ours(request: dict[str, Any]) -> Run:
    """Stream for request["seconds"] after a warm-up, or for one epoch if it is None. Report the start and the end."""
    import streamvid

    with suppress(KeyError):
        request["arguments"]["world"] = streamvid.World(*request["arguments"]["world"])
    seconds = request["seconds"]
    cpu, since = cpu_seconds_of_tree(), time.perf_counter()
    epochs = 1 if seconds is None else None
    loader = streamvid.VideoLoader(request["url"], num_epochs=epochs, output={"decode": False}, **request["arguments"])
    num_samples = num_bytes = 0
    first_batch = 0.0
    with loader:
        batches = iter(loader)
        if seconds is not None:
            _warm(batches)
            cpu, since = cpu_seconds_of_tree(), time.perf_counter()
        say("from")
        for batch in batches:
            num_samples += len(batch.sample_keys)
            num_bytes += sum(clip.data.numel() for clip in batch.clips)
            sum(int(clip.data[-1]) for clip in batch.clips)
            first_batch = first_batch or time.perf_counter() - since
            if seconds is not None and time.perf_counter() - since > seconds:
                break
        spent, took = cpu_seconds_of_tree() - cpu, time.perf_counter() - since
        say("to")
        stats = loader.stats()
    return {
        "num_samples": num_samples, "useful_bytes": num_bytes, "seconds": took, "cpu_seconds": spent,
        "first_batch_seconds": first_batch, "store": str(stats.store), "cache": str(stats.cache),
    }  # fmt: skip


def _warm(batches: Iterator[Any]) -> None:
    until = time.perf_counter() + WARM_SECONDS
    for _ in batches:
        if time.perf_counter() > until:
            return


def say(what: object) -> None:
    """Print a line for the measuring process, and wait until that process has read the proxy's counts."""
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


def role() -> None:
    """Run as the child process: import everything that is needed, then perform one run."""
    import s3fs  # noqa: F401
    import torch

    import streamvid
    import streamvid.dataset.packets
    import streamvid.loader.workers.reader

    torch.set_num_threads(1)
    streamvid.VideoLoader.__name__  # noqa: B018  # imported at its first use
    request = json.loads(sys.stdin.readline())
    say(run_ours(request))


def apart(proxy: FaultProxy | None, **request: Any) -> Run:
    """Run streamvid once in a separate process, and add what the proxy counted between "from" and "to"."""
    command, seen = [sys.executable, "-m", "tools.bench_s3", "--role"], []
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process,
        peak_of(process.pid) as peak,
    ):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        found: Run = {}
        for line in process.stdout:
            if isinstance(told := json.loads(line), dict):
                found = told
            elif proxy is not None:
                counts = proxy.counts()
                seen.append((sum(counts.requests.values()), counts.bytes_down))
            process.stdin.write("\n")
            process.stdin.flush()
    if process.returncode != 0 or not found:
        raise SystemExit(f"the run for {request} failed with exit code {process.returncode}")
    if proxy is not None:
        found |= {"requests": seen[1][0] - seen[0][0], "all_bytes": seen[1][1] - seen[0][1]}
    return {**found, "peak_bytes": max(peak, default=0)}


@contextmanager
def peak_of(pid: int) -> Iterator[list[int]]:
    """Sample the memory of a process tree from time to time: anonymous pages, and shared pages counted once."""
    held: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.25):
            held.append(memory_of(pid).total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield held
    finally:
        over.set()
        thread.join()


# ---------------------------------------------------------------------------------------------- against the link


def link_cases(kind: Kind, options: argparse.Namespace, scratch: Path) -> dict[str, dict[str, Any]]:
    """Map the name of each case to a request that describes the run of streamvid."""
    window_samples = options.window * kind.shard_bytes // kind.sample_bytes
    batch = max(1, round(window_samples * options.fill / RANKS))
    one = {"batch_size": options.batch_size, "num_workers": 0}
    rank = one | {
        "batch_size": batch,
        "world": [RANK, RANKS],
        "schedule": {"window": options.window, "shard_locality": batch * RANKS},
    }
    cache = {"storage": {"cache_dir": str(scratch), "cache_bytes": 2**36}}
    found: dict[str, dict[str, Any]] = {
        "one rank": {"arguments": one, "seconds": options.seconds},
        "one rank, cache": {"arguments": one | cache, "seconds": None},
        f"rank of {RANKS}": {"arguments": rank, "seconds": options.seconds},
        f"rank of {RANKS}, cache": {"arguments": rank | cache, "seconds": None},
    }
    return {name: case for name, case in found.items() if options.cases in name}


def measure_link(options: argparse.Namespace, folder: Path, endpoint: str) -> list[dict[str, Any]]:
    """Return one row per link, kind and case."""
    runs: dict[tuple[str, str, str], list[Run]] = {}
    with FaultProxy(endpoint) as proxy:
        for repeat in range(options.repeats):
            cases = [
                (link, kind.name, name, case)
                for link in options.links
                for kind in options.kinds
                for name, case in link_cases(kind, options, folder / "cache").items()
            ]
            for link, kind, name, case in random.Random(repeat).sample(cases, len(cases)):
                megabytes, milliseconds = map(float, link.split(":"))
                proxy.set(megabytes_per_second=megabytes, latency_ms=milliseconds)
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    storage = {"endpoint_url": proxy.endpoint_url, **case["arguments"].get("storage", {})}
                    if "cache_dir" in storage:
                        storage["cache_dir"] = scratch
                    arguments = case["arguments"] | {"storage": storage}
                    run = apart(proxy, url=f"s3://{kind.lower()}", **(case | {"arguments": arguments}))
                link_bytes = megabytes * 1e6 * run["seconds"]
                run |= {"useful_share": run["useful_bytes"] / link_bytes, "all_share": run["all_bytes"] / link_bytes}
                runs.setdefault((link, kind, name), []).append(_per(run))
                print(link, kind, name, _short(run), file=sys.stderr)
    return [{"link": key[0], "kind": key[1], "case": key[2], **medians(found)} for key, found in sorted(runs.items())]


def _per(run: Run) -> Run:
    run["samples_per_second"] = run["num_samples"] / run["seconds"]
    if "requests" in run:
        run["requests_per_sample"] = run["requests"] / run["num_samples"]
    if "useful_bytes" in run:
        run["cpu_seconds_per_gb"] = run["cpu_seconds"] / run["useful_bytes"] * 1e9
    return run


def _short(run: Run) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in run.items()
    )


def medians(runs: list[Run]) -> dict[str, list[float]]:
    """Return the median, lowest and highest value of each figure."""
    figures = [name for name, value in runs[0].items() if isinstance(value, int | float)]
    return {
        name: [statistics.median(values), min(values), max(values)]
        for name in figures
        if (values := [run[name] for run in runs if name in run])
    }


# ---------------------------------------------------------------------------------------------- against the peers


def measure_peers(options: argparse.Namespace, endpoint: str) -> list[dict[str, Any]]:
    """Return one row per kind and method."""
    rows: list[dict[str, Any]] = []
    with FaultProxy(endpoint) as proxy:
        for kind in options.kinds:
            methods: dict[str, Callable[..., Run]] = {**_ours(kind, options), **_peers(kind, options)}
            runs: dict[str, list[Run]] = {name: [] for name in methods}
            for repeat in range(options.repeats):
                for name in random.Random(repeat).sample(sorted(runs), len(runs)):
                    run = methods[name](endpoint)
                    if "error" in run:
                        print(f"{name} is left out: {run['error']}", file=sys.stderr)
                        del runs[name]
                        continue
                    runs[name].append(_per(run))
                    print(kind.name, name, _short(run), file=sys.stderr)
            for name, found in runs.items():
                proxy.reset_counts()
                counted = methods[name](proxy.endpoint_url)
                requests = sum(proxy.counts().requests.values()) / max(1, counted.get("num_samples", 0))
                rows.append({"kind": kind.name, "case": name, **medians(found), "requests_per_sample": [requests] * 3})
    return rows


def _ours(kind: Kind, options: argparse.Namespace) -> dict[str, Callable[[str], Run]]:
    one = {"batch_size": options.batch_size, "num_workers": options.workers}
    cases = {
        "streamvid": (one | {"shuffle": "none"}, False),
        "streamvid shuffled": (one, False),
        "streamvid cache": (one | {"shuffle": "none"}, True),
        "streamvid shuffled cache": (one, True),
    }

    def run(arguments: dict[str, Any], cached: bool, endpoint: str) -> Run:
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            cache = {"cache_dir": scratch, "cache_bytes": 2**36} if cached else {}
            asked = arguments | {"storage": {"endpoint_url": endpoint, **cache}}
            return apart(None, url=f"s3://{kind.name.lower()}", arguments=asked, seconds=None)

    return {name: partial(run, *case) for name, case in cases.items() if name in options.methods}


def _peers(kind: Kind, options: argparse.Namespace) -> dict[str, Callable[[str], Run]]:
    def run(method: str, endpoint: str) -> Run:
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            return client.run_s3(
                options.peers,
                method=method,
                endpoint=endpoint,
                bucket=f"peers-{kind.name.lower()}",
                num_samples=kind.num_samples,
                workers=options.workers,
                batch_size=options.batch_size,
                scratch=scratch,
            )

    return {name: partial(run, name) for name in PEERS if name in options.methods}


# ---------------------------------------------------------------------------------------------- printing

COLUMNS = (
    ("useful %", "useful_share", 100.0),
    ("all %", "all_share", 100.0),
    ("samples/s", "samples_per_second", 1.0),
    ("CPU s/GB", "cpu_seconds_per_gb", 1.0),
    ("requests/sample", "requests_per_sample", 1.0),
    ("first batch s", "first_batch_seconds", 1.0),
    ("MiB", "peak_bytes", 2.0**-20),
)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the results as a table: median (lowest-highest)."""
    columns = [column for column in COLUMNS if any(column[1] in row for row in rows)]
    print(f"{'':<42}" + "".join(f"{name:>26}" for name, _, _ in columns))
    for row in rows:
        cells = ""
        for _, figure, unit in columns:
            if figure in row:
                median, low, high = (value * unit for value in row[figure])
                cells += f"{median:>12.4g} ({low:.4g}-{high:.4g})".rjust(26)
            else:
                cells += " " * 26
        print(f"{row.get('link', ''):<8} {row['kind']:<6} {row['case']:<26}" + cells)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["link", "peers"])
    parser.add_argument("--kinds", default="100KB,1MB")
    parser.add_argument("--links", type=lambda text: text.split(","), default=["50:30", "50:100", "100:30", "100:100"])
    parser.add_argument("--cases", default="", help="measure only link cases whose names contain this text")
    parser.add_argument("--dataset-bytes", type=int, default=10**9)
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--window", type=int, default=16, help="shards per shuffle window of one of many ranks")
    parser.add_argument("--fill", type=float, default=0.75, help="share of the window's samples that one step delivers")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    ours = ("streamvid", "streamvid shuffled", "streamvid cache", "streamvid shuffled cache")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=[*ours, *PEERS])
    parser.add_argument("--work", type=Path, help="folder in which to keep the datasets for the next run")
    parser.add_argument("--peers", type=Path, default=client.PYTHON, help="Python interpreter of the peers")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    known = kinds(options.dataset_bytes, options.shards)
    options.kinds = [known[name] for name in options.kinds.split(",")]
    return options


def main() -> None:
    """Parse the command line, measure, and print the results."""
    if sys.argv[1:] == ["--role"]:
        role()
        return
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder = Path(name)
        work = options.work or folder
        datasets = {kind: make_dataset(work, kind) for kind in options.kinds}
        with rgw(folder) as endpoint:
            for kind, dataset in datasets.items():
                if options.mode == "link" or any("streamvid" in method for method in options.methods):
                    upload(dataset, endpoint, kind.name.lower())
                if options.mode == "peers":
                    converted = work / f"peers-{dataset.name}"
                    if not converted.exists():
                        client.convert(dataset, converted, python=options.peers)
                    upload(converted, endpoint, f"peers-{kind.name.lower()}")
            measure = measure_link(options, folder, endpoint) if options.mode == "link" else None
            rows = measure if measure is not None else measure_peers(options, endpoint)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
