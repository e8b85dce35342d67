"""Find batch sizes for a model and GPU, such that a step takes about the same time for every bucket.

    python -m tools.search_batch_sizes --factory my.module:make_step DATASET
        [--base BUCKET] [--max-batch-size N] [--warmup 5] [--steps 5] [--tolerance 0.0] [--layout BCTHW] [--json]

make_step() returns step(shape), which runs one training step on a batch of this shape, for example:

    def make_step():
        model, optimizer = ...
        def step(shape):
            video = torch.rand(shape, device="cuda", dtype=torch.bfloat16)
            model(video).mean().backward()
            optimizer.step(); optimizer.zero_grad()
        return step

The base bucket (by default the largest) gets as many samples as fit in memory. Every other bucket gets as many samples
as possible without a longer step. Standard error shows each batch that is tried. Standard output is YAML for
`batch_size:` in a configuration or, with --json, all measurements. The exit status is 1 if a bucket does not run with
one sample, and 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from streamvid import VideoLoader, World, search_batch_sizes
from streamvid.bench.batch_search import MAX_BATCH_SIZE, BatchSizeSearch, Step, Trial
from streamvid.cli.console import print_table
from streamvid.errors import ConfigError, StreamvidError


def load_step(name: str) -> Step:
    """Return the step function that `module:function` makes.

    Raises ConfigError if the function does not exist or does not return a callable.
    """
    module_name, _, function_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--factory {name!r}: {error}; write it as my.module:make_step") from error
    step: Any = factory()
    if not callable(step):
        raise ConfigError(f"--factory {name!r} returned {step!r}; it must return a function step(shape)")
    return step  # type: ignore[no-any-return]


def yaml_of(found: BatchSizeSearch) -> str:
    """Format the batch sizes as the `batch_size:` section of a configuration."""
    return "\n".join(["batch_size:", *(f"  {name}: {size}" for name, size in found.sizes.items())])


def print_sizes(found: BatchSizeSearch) -> None:
    """Print one row per bucket on standard error."""
    notes = dict.fromkeys(found.slower, "slower than the base with one sample") | {found.base: "base"}
    rows = [[name, size, f"{found.seconds[name]:.4g}", notes.get(name, "")] for name, size in found.sizes.items()]
    rows += [[name, 0, "-", "out of memory with one sample"] for name in found.too_large]
    print_table(["bucket", "batch size", "seconds", ""], rows, err=True)


def _show(trial: Trial) -> None:
    what = "out of memory" if trial.seconds is None else f"{trial.seconds:.4g} s"
    print(f"{trial.bucket_id} x {trial.batch_size}: {what}", file=sys.stderr, flush=True)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.search_batch_sizes", description=__doc__.splitlines()[0])
    parser.add_argument("dataset", metavar="DATASET")
    parser.add_argument("--factory", required=True, metavar="MODULE:FUNCTION")
    parser.add_argument("--split", default="train")
    parser.add_argument("--base", metavar="BUCKET")
    parser.add_argument("--max-batch-size", type=int, default=MAX_BATCH_SIZE)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--layout", default="BCTHW", choices=["BCTHW", "BTCHW"])
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = _arguments(argv)
    try:
        # tail="pad": a bucket of few samples has its shape all the same.
        options: dict[str, Any] = {
            "tail": "pad",
            "num_workers": 0,
            "split": given.split,
            "output": {"layout": given.layout},
        }
        with VideoLoader(given.dataset, batch_size=1, world=World(0, 1), **options) as loader:
            shapes = loader.shapes
        found = search_batch_sizes(
            load_step(given.factory), shapes, base=given.base, max_batch_size=given.max_batch_size,
            warmup=given.warmup, steps=given.steps, tolerance=given.tolerance, on_trial=_show,
        )  # fmt: skip
    except StreamvidError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print_sizes(found)
    print(json.dumps(found.to_json(), indent=2) if given.json else yaml_of(found))
    return 1 if found.too_large else 0


if __name__ == "__main__":
    sys.exit(main())
