"""The names that users type, frozen: a change here is a change of contract and belongs in CHANGELOG.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

import streamvid

HEAVY = (
    "torch",
    "av",
    "pandas",
    "accelerate",
    "webdataset",
    "pyarrow",
    "numpy",
    "pydantic",
    "tqdm",
    "rich",
    "botocore",
    "fsspec",
)


def test_public_names() -> None:
    assert streamvid.__all__ == [
        "Batch",
        "BatchSizeSearch",
        "Bucket",
        "BucketConfig",
        "BucketTable",
        "CaptionOptions",
        "ClipOptions",
        "CostTable",
        "Dataset",
        "DatasetConfig",
        "LoaderStats",
        "ModelRule",
        "ShardOptions",
        "SourceOptions",
        "StorageOptions",
        "StreamvidError",
        "TrainConfig",
        "VideoInfo",
        "VideoLoader",
        "WorkOptions",
        "World",
        "__version__",
        "annotate",
        "copy_dataset",
        "detect_world",
        "dry_run",
        "fit_costs",
        "load_bucket_config",
        "load_config",
        "open_dataset",
        "probe",
        "search_batch_sizes",
        "shard",
        "train",
        "verify_dataset",
        "world_from_mesh",
    ]


@pytest.mark.parametrize("name", streamvid.__all__)
def test_every_public_name_loads_and_is_documented(name: str) -> None:
    value = getattr(streamvid, name)
    assert name == "__version__" or value.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        _ = streamvid.Loader


@pytest.mark.parametrize(
    "statement", ["import streamvid", "import streamvid.loader.workers.worker", "import streamvid.cli.main"]
)
def test_importing_is_light(statement: str) -> None:
    """A worker, a notebook and `--help` pay for nothing that they do not use."""
    code = f"{statement}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, streamvid.cli\nsys.argv = ['streamvid', '--help']\n"
        "try: streamvid.cli.main()\nexcept SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert "shard" in result.stdout
