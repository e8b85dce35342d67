"""Tests that freeze the public names: a change here changes the contract and belongs in CHANGELOG.md."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

import streamvid
from streamvid.config import option_info, option_types
from tests.processes import run_python

PACKAGE = Path(streamvid.__file__).parent
MANY_FIELDS = {"LoaderStats", "VideoInfo"}
"""Public dataclasses with more than 12 fields: not options, or still to be divided."""
SHARED_NAMES = {"Members", "Record", "Sidecar", "_Reader"}
"""Names that several classes share and that are still to be made unique."""
HEAVY = (
    "torch",
    "urllib.request",
    "av",
    "pandas",
    "accelerate",
    "webdataset",
    "pyarrow",
    "numpy",
    "pydantic",
    "tqdm",
    "rich",
    "s3fs",
    "botocore",
    "fsspec",
    "prometheus_client",
)


def test_public_names() -> None:
    assert streamvid.__all__ == [
        "AudioOptions",
        "Batch",
        "BatchSizeSearch",
        "Bucket",
        "BucketConfig",
        "BucketTable",
        "CaptionOptions",
        "ClipOptions",
        "ClusterOptions",
        "CostTable",
        "CurationOptions",
        "Dataset",
        "DatasetConfig",
        "LimitOptions",
        "LoaderStats",
        "ModelRule",
        "OutputOptions",
        "ProcessGroups",
        "ScheduleOptions",
        "ShardOptions",
        "SourceOptions",
        "StorageOptions",
        "StreamvidError",
        "TextOptions",
        "TrainConfig",
        "VideoInfo",
        "VideoLoader",
        "ViewOptions",
        "WorkOptions",
        "World",
        "__version__",
        "annotate",
        "append",
        "compact",
        "copy_dataset",
        "detect_world",
        "dry_run",
        "fit_costs",
        "load_bucket_config",
        "load_config",
        "merge",
        "open_dataset",
        "probe",
        "remove",
        "search_batch_sizes",
        "shard",
        "tag",
        "train",
        "verify_dataset",
        "versions",
        "view",
        "world_from_mesh",
    ]


def public_dataclasses() -> dict[str, type]:
    """Return every exported dataclass, and those nested in their fields, by name."""
    found: dict[str, type] = {}
    waiting = [getattr(streamvid, name) for name in streamvid.__all__]
    while waiting:
        value = waiting.pop()
        if not (isinstance(value, type) and dataclasses.is_dataclass(value)) or value.__name__ in found:
            continue
        found[value.__name__] = value
        for members in option_types(value).values():
            waiting += members
    return found


def test_the_loader_has_24_arguments() -> None:
    arguments = list(inspect.signature(streamvid.VideoLoader).parameters)
    assert len(arguments) <= 24, arguments


def test_option_objects_have_at_most_12_fields() -> None:
    found = public_dataclasses()
    assert {"ViewOptions", "OutputOptions", "ScheduleOptions", "LimitOptions", "StorageOptions"} <= found.keys()
    assert {"ProcessGroups", "DatasetConfig", "TextOptions", "ShardOptions", "TrainConfig"} <= found.keys()
    large = {name: len(dataclasses.fields(cls)) for name, cls in found.items() if len(dataclasses.fields(cls)) > 12}
    assert large.keys() <= MANY_FIELDS, large


@pytest.mark.parametrize(
    "name", ["ViewOptions", "OutputOptions", "AudioOptions", "ScheduleOptions", "LimitOptions", "ProcessGroups"]
)
def test_each_option_of_the_loader_is_declared_with_its_documentation(name: str) -> None:
    for field in dataclasses.fields(getattr(streamvid, name)):
        info = option_info(field)
        assert info is not None and info.help, f"{name}.{field.name}"


def test_no_two_classes_share_a_name() -> None:
    """Class names, including private ones, are unique in the whole package."""
    homes: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert shared.keys() <= SHARED_NAMES, shared


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
    """Importing the package, a worker or the command line loads no heavy library."""
    code = f"{statement}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = run_python(code)
    assert result.stdout.strip() == "[]"


def test_help_imports_nothing_heavy() -> None:
    """Neither `streamvid --help` nor the help of any verb imports a heavy library."""
    verbs = ("", "annotate", "append", "bench", "compact", "copy", "demo", "encode", "extract", "ledger")
    verbs += (
        "ledger check",
        "ledger show",
        "merge",
        "plan",
        "presets",
        "preview",
        "remove",
        "report",
        "shard",
        "stats",
        "train",
    )
    verbs += ("verify", "versions")
    code = (
        f"import sys\nfrom streamvid.cli import main\nfor verb in {verbs!r}:\n"
        "    sys.argv = ['streamvid', *verb.split(), '--help']\n"
        "    try: main()\n    except SystemExit: pass\n"
        f"    print('after', verb, [m for m in {(*HEAVY, 'rich', 'urllib.request')!r} if m in sys.modules])"
    )
    found = [line for line in run_python(code).stdout.splitlines() if line.startswith("after")]
    assert found == [f"after {verb} []" for verb in verbs]
