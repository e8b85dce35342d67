"""Tests of streamvid train with DiffSynth-Studio's flags, judged by the samples that a user's module receives."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from streamvid.cli.verbs.train import command
from streamvid.compat.dataset_cache import VARIABLE, cache_folder
from streamvid.compat.diffsynth_data import NOTE
from streamvid.errors import ConfigError
from tests.clips import ROOT
from tests.compat.conftest import make_videos
from tests.compat.logged_training import PIXELS
from tests.compat.test_diffsynth import config_of
from tests.processes import run_command

FACTORY = "tests.compat.logged_training:build"
CLIPS = {"a": (96, 64, 12), "b": (96, 64, 9), "c": (96, 64, 30), "d": (96, 64, 13), "e": (160, 96, 8)}
SHAPES = dict.fromkeys("abcd", (9, 64, 96)) | {"e": (5, 64, 112)}  # frames, height and width that DiffSynth would use
SIZES = ("--max_pixels", "8000", "--num_frames", "9")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five clips, four of them in one bucket, the first two with a control video."""
    return make_videos(tmp_path_factory.mktemp("media") / "videos", CLIPS, "ab", "street {}")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cache shared by all runs in this file, and a single thread, because tests share a machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))
        patch.chdir(ROOT)
        yield
    torch.set_num_threads(num_threads)


def arguments(log: Path, *given: object) -> list[str]:
    fixed = ["--factory", FACTORY, "--set", f"model.args={{log: {log}}}", "--set", "accelerate.cpu=true"]
    return [*fixed, "--set", "eval.num_batches=0", *map(str, given)]


def train(log: Path, *given: object) -> int:
    """Run the command in this process; return its exit code."""
    code = command.main(arguments(log, *given), standalone_mode=False)
    assert isinstance(code, int)
    return code


def logged(log: Path) -> list[dict[str, Any]]:
    """Return the records of the modules on all ranks."""
    return [json.loads(line) for file in sorted(log.iterdir()) for line in file.read_text().splitlines()]


def of_metadata(videos: Path) -> tuple[object, ...]:
    return ("--dataset_base_path", videos, "--dataset_metadata_path", videos / "metadata.csv", *SIZES)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_all_clips_in_the_metadata_are_trained_on(videos: Path, tmp_path: Path, num_workers: int) -> None:
    """Checklist 3, 7, 8, 10, 12, 17 and 20: each clip comes dataset_repeat times num_epochs times, in its own shape,
    with its caption, column and control video, with and without workers."""
    log, output = tmp_path / "log", tmp_path / "run"
    code = train(
        log, *of_metadata(videos), "--data_file_keys", "video,control_video", "--extra_inputs", "control_video,score",
        "--dataset_repeat", 2, "--num_epochs", 2, "--dataset_num_workers", num_workers, "--trainable_models", "dit",
        "--output_path", output,
    )  # fmt: skip
    steps = logged(log)
    assert code == 0
    assert Counter(text for step in steps for text in step["texts"]) == {f"street {name}": 4 for name in CLIPS}
    assert all(len(step["keys"]) == 1 for step in steps)
    for step in steps:
        name = step["texts"][0][-1]
        frames, height, width = SHAPES[name]
        assert step["shape"] == [1, 4, frames, height // PIXELS, width // PIXELS]
        assert step["media"] == {"control_video": [1, 3, frames, height, width]}
        assert step["score"] == [list(CLIPS).index(name)]
    assert sorted(path.name for path in output.glob("*.safetensors")) == ["epoch-0.safetensors", "epoch-1.safetensors"]


def test_ranks_share_the_samples_and_one_of_them_shards(videos: Path, tmp_path: Path) -> None:
    """Checklist 39: `accelerate launch -m streamvid train` with two real processes shards the files on first use. The
    fifth clip is alone in its bucket, so it fills no step of both ranks in the first epoch."""
    log, config = tmp_path / "log", ROOT / "configs" / "accelerate" / "cpu_2ranks.yaml"
    given = (*of_metadata(videos), "--trainable_models", "dit", "--output_path", tmp_path / "run")
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(config),
        "-m",
        "streamvid",
        "train",
    ]
    environment = {**os.environ, **ONE_THREAD, VARIABLE: str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = run_command([*launch, *arguments(log, *given)], env=environment)
    assert done.stderr.count("rows: 5 samples in 2 buckets") == 1
    steps = logged(log)
    assert {step["rank"] for step in steps} == {0, 1}
    assert Counter(text for step in steps for text in step["texts"]) == {f"street {name}": 1 for name in "abcd"}
    assert (tmp_path / "run" / "epoch-0.safetensors").is_file()


DOCUMENTED = (
    "--learning_rate", "1e-4", "--num_epochs", "2", "--remove_prefix_in_ckpt", "pipe.dit.", "--lora_base_model", "dit",
    "--lora_target_modules", "q,o", "--lora_rank", "2", "--use_gradient_checkpointing", "--dataset_num_workers", "1",
    "--find_unused_parameters", *SIZES[:2],
)  # fmt: skip
"""Flags that both commands of the document share, with other layer names and another rank."""


def test_the_documents_two_commands(videos: Path, tmp_path: Path) -> None:
    """Checklist 36 to 38 and 43: stage 1 writes a folder, from which stage 2 trains without other data flags: each clip
    dataset_repeat times, without an encoder, and with adapters saved without the prefix."""
    latents, output, log = tmp_path / "splited-cache", tmp_path / "run", tmp_path / "log"
    metadata = ("--dataset_metadata_path", videos / "metadata.csv", "--dataset_repeat", 1, "--num_frames", 9)
    stage_1 = ("--dataset_base_path", videos, *metadata, "--output_path", latents, *DOCUMENTED)
    assert train(log, *stage_1, "--task", "sft:data_process") == 0
    assert not log.exists()
    base = json.loads((latents / NOTE).read_text())["dataset"]
    assert Path(base).parent == cache_folder()

    stage_2 = ("--dataset_base_path", latents, "--dataset_repeat", 3, "--output_path", output, *DOCUMENTED)
    assert train(log, *stage_2, "--task", "sft:train", "--initialize_model_on_cpu") == 0
    steps = logged(log)
    assert Counter(text for step in steps for text in step["texts"]) == {f"street {name}": 6 for name in CLIPS}
    assert not any(step["has_encoder"] for step in steps)
    for step in steps:
        frames, height, width = SHAPES[step["texts"][0][-1]]
        assert step["shape"] == [1, 4, frames, height // PIXELS, width // PIXELS]
    from safetensors import safe_open

    with safe_open(str(output / "epoch-1.safetensors"), framework="pt") as file:
        names = set(file.keys())
    assert {name.split(".")[0] for name in names} == {"blocks"} and any(
        name.endswith("q.lora_A.default.weight") for name in names
    )

    # Repeating the first stage does nothing; its output cannot be used for another task or with other sizes.
    assert train(log, *stage_1, "--task", "sft:data_process") == 0
    with pytest.raises(ConfigError, match="set task to sft:train"):
        train(log, *stage_2, "--task", "sft")
    with pytest.raises(ConfigError, match="num_frames is 5, but the dataset .* was sharded with num_frames=9"):
        train(log, *stage_2, "--task", "sft:train", "--num_frames", 5)
    (latents / NOTE).unlink()
    with pytest.raises(ConfigError, match="--set data.dataset=URL"):
        train(log, *stage_2, "--task", "sft:train")


def test_the_low_memory_recipe(videos: Path, tmp_path: Path) -> None:
    """Checklist 43: one script runs both stages with one path between them; here, each stage uses one process and no
    GPU."""
    log, output = tmp_path / "log", tmp_path / "run"
    environment = {
        **os.environ, **ONE_THREAD, "LAUNCH": sys.executable, "FACTORY": FACTORY, "DATA": str(videos),
        "METADATA": str(videos / "metadata.csv"), "OUTPUT": str(output), "LORA_LAYERS": "q,o", "LORA_RANK": "2",
    }  # fmt: skip
    script = [str(ROOT / "configs" / "recipes" / "low_memory.sh"), *arguments(log, *SIZES)[2:]]
    run_command(["bash", *script], env=environment)
    steps = logged(log)
    assert Counter(text for step in steps for text in step["texts"]) == {f"street {name}": 1 for name in CLIPS}
    assert not any(step["has_encoder"] for step in steps)
    assert (output / "epoch-0.safetensors").is_file() and (output / "latents" / "manifest.json").is_file()


def test_a_new_project_trains(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`streamvid train --init` writes a template that works unchanged in its own folder, and overwrites no files."""
    project = tmp_path / "my_project"
    assert command.main(["--init", str(project)], standalone_mode=False) == 0
    written = {path.name: path.read_text() for path in project.iterdir()}
    assert set(written) == {"training.py", "config.yaml", "README.md"}
    with pytest.raises(ConfigError, match="not empty"):
        command.main(["--init", str(project)], standalone_mode=False)
    assert {path.name: path.read_text() for path in project.iterdir()} == written
    dataset = config_of(*of_metadata(videos)).data.dataset
    changes = (
        f"data.dataset={dataset}",
        "max_steps=2",
        "eval.sample_steps=2",
        "eval.steps=2",
        "eval.num_batches=1",
        "eval.split=train",
    )
    settings = [word for change in (*changes, "data.batch_size=1", "accelerate.cpu=true") for word in ("--set", change)]
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the folder of training.py to this list
    assert command.main(["--config", "config.yaml", *settings], standalone_mode=False) == 0
    del sys.modules["training"]
    assert "step 2: loss" in capsys.readouterr().out
    names = {str(path.relative_to(project / "run")) for path in (project / "run").rglob("*") if path.is_file()}
    assert {"step-2.safetensors", "metrics.jsonl", "samples/step-2.mp4", "samples/step-2.png"} <= names


def test_mistakes_are_reported_before_anything_is_sharded(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    wrongs = (
        ("learning_rate=1", "learning_rate"),
        ("max_steps=many", "max_steps"),
        ("model.weights.paths=[no.safetensors]", "no.safetensors"),
        ("model.factory=tests.compat.logged_training:biuld", "biuld"),
    )
    for wrong, says in wrongs:
        with pytest.raises(ConfigError, match=says):
            train(tmp_path / "log", *of_metadata(videos), "--output_path", tmp_path / "run", "--set", wrong)
    assert list(tmp_path.iterdir()) == []
