"""Other loaders over the same clips: one run of one of them, in a process of its own.

    .peers/bin/python -m tools.peers.loader         (from the root of the checkout)

Reads one JSON line: {"method", "root" (what tools.peers.convert wrote), "workers" (processes, 1 or more),
"batch_size", "decode" (true or false), "epochs" (timed ones, 1 or more)}, and with decode "num_frames" (16), "height"
and "width" (null: as the clips are). Answers with one line, see `run`, or {"error"}. {"method": "versions"} answers
{"versions", "missing": {method: why}}.

Without decode a batch is a list of the clips' bytes, of each of which the last is read. With it each worker decodes
a random window of each clip with PyAV (clips.random_window) and stacks them, (B, T, H, W, 3), uint8, as a tensor in
shared memory; one byte of every page of it is read. All loaders go through the clips in stored order (the cheapest
they have), with workers kept from epoch to epoch, and run at their defaults otherwise.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from tools.peers.clips import random_window, stand_in_for_torchvision
from tools.peers.decode import missing

PAGE_BYTES = 4096
Batch = Any  # list[bytes], or a uint8 tensor (B, T, H, W, 3)
Collate = Callable[[list[bytes]], Batch]


@dataclass(frozen=True)
class Job:
    """What one run is asked for."""

    root: Path
    workers: int
    batch_size: int
    collate: Collate
    num_samples: int


def keep(clips: list[bytes]) -> Batch:
    """Without decode: the bytes as they are."""
    return clips


def decoded(clips: list[bytes], num_frames: int, size: tuple[int, int] | None) -> Batch:
    """With decode: a window of each, stacked."""
    import torch

    return torch.stack([torch.from_numpy(random_window(data, num_frames, size)) for data in clips])


def touch(batch: Batch) -> int:
    """Reads a little of everything; how many samples it is."""
    if isinstance(batch, list):
        sum(data[-1] for data in batch)
    else:
        int(batch.view(-1)[::PAGE_BYTES].sum())
    return len(batch)


# ---------------------------------------------------------------------------------------------- the methods
# Each takes a job and returns something that gives an epoch's batches each time it is iterated.


def files(job: Job) -> Iterable[Batch]:
    """torch's DataLoader over a file a clip."""
    return to_data_loader(job, _Files(sorted((job.root / "files").iterdir())), job.collate)


class _Files:
    def __init__(self, paths: list[Path]) -> None:
        self._paths = [str(path) for path in paths]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:
        with open(self._paths[index], "rb") as file:  # noqa: PTH123  # half the time of Path.read_bytes
            return file.read()


def to_data_loader(job: Job, dataset: Any, collate: Callable[[Any], Batch]) -> Iterable[Batch]:
    """torch's DataLoader over any dataset."""
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset, batch_size=job.batch_size, num_workers=job.workers, collate_fn=collate, persistent_workers=True
    )


def of_rows(rows: list[dict[str, Any]], collate: Collate) -> Batch:
    """A batch of rows that have the clip's bytes as "clip"."""
    return collate([row["clip"] for row in rows])


def webdataset(job: Job) -> Iterable[Batch]:
    """The tars, shared out among workers; batches made in the workers."""
    return webdataset_of(job, [str(path) for path in sorted((job.root / "webdataset").iterdir())])


def webdataset_of(job: Job, tars: list[str]) -> Iterable[Batch]:
    """The same of paths or URLs."""
    import webdataset as wds

    dataset = wds.WebDataset(tars, shardshuffle=False, empty_check=False, workersplitter=wds.split_by_worker)
    dataset = dataset.map(_clip_of).batched(job.batch_size, collation_fn=job.collate, partial=True)
    return wds.WebLoader(dataset, batch_size=None, num_workers=job.workers, persistent_workers=True)  # type: ignore[no-any-return]


def _clip_of(sample: dict[str, Any]) -> bytes:
    (name,) = [name for name in sample if not name.startswith("__") and name not in ("json", "txt")]
    return bytes(sample[name])


def energon(job: Job) -> Iterable[Batch]:
    """Crude samples through a task encoder; one endless stream, as its authors use it, counted off in epochs."""
    return energon_of(job, job.root / "energon")


def energon_of(job: Job, path: Path | str) -> Iterable[Batch]:
    """The same of a path or an msc:// URL."""
    from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, stateless

    @stateless
    def cook(sample: Any) -> Any:
        return sample

    class Encoder(DefaultTaskEncoder):
        decoder = None  # bytes are wanted, not Energon's AVDecoder
        cookers = [Cooker(cook)]  # noqa: RUF012  # as Energon wants it

        def encode_sample(self, sample: Any) -> bytes:
            return _clip_of(sample)

        def batch(self, samples: list[bytes]) -> Batch:
            return job.collate(samples)

    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=job.workers),
        batch_size=job.batch_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        shuffle_over_epochs_multiplier=None,
        parallel_shard_iters=1,
        task_encoder=Encoder(),
    )
    return _Endless(get_loader(dataset), -(-job.num_samples // job.batch_size))


class _Endless:
    def __init__(self, loader: Iterable[Batch], num_batches: int) -> None:
        self._loader, self._num_batches = loader, num_batches
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        self._batches = self._batches or iter(self._loader)
        return islice(self._batches, self._num_batches)


def litdata(job: Job) -> Iterable[Batch]:
    """litdata's StreamingDataLoader over its chunks."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(job.root / "litdata"), shuffle=False, drop_last=False)
    return StreamingDataLoader(  # type: ignore[no-any-return]
        dataset,
        batch_size=job.batch_size,
        num_workers=job.workers,
        collate_fn=partial(of_rows, collate=job.collate),
        persistent_workers=True,
    )


def mosaic(job: Job) -> Iterable[Batch]:
    """torch's DataLoader over mosaic's StreamingDataset, its shards local."""
    stand_in_for_torchvision()
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(job.root / "mosaic"), shuffle=False, batch_size=job.batch_size)
    return to_data_loader(job, dataset, partial(of_rows, collate=job.collate))


def datasets(job: Job) -> Iterable[Batch]:
    """torch's DataLoader over Hugging Face's Arrow table, memory-mapped."""
    from datasets import load_from_disk

    return to_data_loader(job, load_from_disk(str(job.root / "datasets")), partial(of_rows, collate=job.collate))


METHODS: dict[str, Callable[[Job], Iterable[Batch]]] = {
    "files": files,
    "webdataset": webdataset,
    "energon": energon,
    "litdata": litdata,
    "mosaic": mosaic,
    "datasets": datasets,
}
NEEDS = {
    "files": "torch",
    "webdataset": "webdataset",
    "energon": "megatron.energon",
    "litdata": "litdata",
    "mosaic": "streaming",
    "datasets": "datasets",
}


# ---------------------------------------------------------------------------------------------- measuring


def cpu_seconds_of_tree() -> float:
    """User and system seconds of this process, of children that ended, and of all that live below it."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = sum(_ticks(process) for process in _below(os.getpid()))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + ticks / os.sysconf("SC_CLK_TCK")


def _below(process: int) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in map(int, children.read_text().split()):
                yield child
                yield from _below(child)


def _ticks(process: int) -> int:
    """Its own, and those of its children that ended."""
    with suppress(OSError):  # it has ended
        return sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return 0


def run(method: str, job: Job, epochs: int) -> dict[str, float]:
    """One epoch to start and warm up, then the timed ones.

    - first_batch_seconds: from before the loader is made; imports are done.
    - num_samples, num_batches, seconds: of the timed epochs; samples_per_second.
    - cpu_seconds_per_sample: all processes, timed epochs (workers' clocks tick every 10 ms);
      main_cpu_seconds_per_batch: the main process alone, all its threads, likewise.
    - start_cpu_seconds: all processes, from making the loader to the end of the first epoch.
    """
    began, cpu_began = time.perf_counter(), cpu_seconds_of_tree()
    loader = METHODS[method](job)
    first_batch, warm_samples = 0.0, 0
    for batch in loader:
        warm_samples += touch(batch)
        first_batch = first_batch or time.perf_counter() - began
    cpu, main, wall = cpu_seconds_of_tree(), time.process_time(), time.perf_counter()
    num_samples, num_batches = 0, 0
    for _ in range(epochs):
        for batch in loader:
            num_samples += touch(batch)
            num_batches += 1
    main_spent, seconds = time.process_time() - main, time.perf_counter() - wall
    spent = cpu_seconds_of_tree() - cpu
    if not num_samples:
        raise ValueError("no sample came")
    return {
        "first_batch_seconds": first_batch,
        "warm_samples": warm_samples,
        "num_samples": num_samples,
        "num_batches": num_batches,
        "seconds": seconds,
        "samples_per_second": num_samples / seconds,
        "cpu_seconds_per_sample": spent / num_samples,
        "main_cpu_seconds_per_batch": main_spent / num_batches,
        "start_cpu_seconds": cpu - cpu_began,
    }


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One request's answer; {"error": why} where the peer cannot do it."""
    method = request.get("method")
    stand_in_for_torchvision()
    if method == "versions":
        return {"versions": _versions(), "missing": missing(NEEDS)}
    if method not in METHODS:
        return {"error": f"method is {method!r}, there are {sorted(METHODS)}"}
    try:
        began = time.perf_counter()
        __import__("torch").set_num_threads(1)
        __import__(NEEDS[method])
        imports = time.perf_counter() - began
        return {**run(method, _job(request), int(request["epochs"])), "import_seconds": imports}
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is its answer
        return {"error": f"{type(error).__name__}: {error}"}


def _job(request: dict[str, Any]) -> Job:
    root = Path(request["root"]).absolute()
    collate: Collate = keep
    if request["decode"]:
        size = (int(request["height"]), int(request["width"])) if request.get("height") else None
        collate = partial(decoded, num_frames=int(request.get("num_frames", 16)), size=size)
    num_samples = json.loads((root / "convert.json").read_text())["num_samples"]
    return Job(root, int(request["workers"]), int(request["batch_size"]), collate, num_samples)


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "webdataset", "megatron-energon", "litdata", "mosaicml-streaming", "datasets", "av", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Answer one line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    found = answer(json.loads(sys.stdin.readline()))
    gc.collect()
    answers.write(json.dumps(found) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
