"""Tests that run the examples as a user does and check keys, losses, checkpoints and leftover processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from accelerate import skip_first_batches

import streamvid
from tests.conftest import Sharded

EXAMPLES = Path(__file__).resolve().parent.parent / "tools" / "examples"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
# A few seconds on an idle machine; on a shared one, up to ten times as long.
TIMEOUT_SECONDS = 280
pytestmark = pytest.mark.timeout(900)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node")


@pytest.fixture
def keys(sharded: Sharded) -> list[str]:
    return sorted(streamvid.open_dataset(sharded.root).samples_table()["key"].to_pylist())


def start(name: str, dataset: Path, *arguments: object, cwd: Path, launcher: Iterable[object] = ()) -> Any:
    command = [sys.executable, *map(str, launcher), str(EXAMPLES / name), str(dataset), *map(str, arguments)]
    with (cwd / "stderr.txt").open("w") as stderr:
        return subprocess.Popen(
            command, cwd=cwd, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        )


def finish(process: Any, cwd: Path) -> tuple[int, str]:
    """Wait for an example and return its exit status and output; fail if other processes of its session remain."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    deadline = time.monotonic() + 20
    while left := session(process.pid):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
    (cwd / "stderr.txt").rename(cwd / "stderr-of-the-last.txt")
    return process.returncode, output


def session(leader: int) -> list[str]:
    left = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline()))
        except (psutil.Error, ProcessLookupError):
            continue
    return left


def run(name: str, dataset: Path, *arguments: object, cwd: Path, launcher: Iterable[object] = ()) -> dict[str, Any]:
    """Run an example and return the JSON of the last line that it prints."""
    code, output = finish(start(name, dataset, *arguments, cwd=cwd, launcher=launcher), cwd)
    assert code == 0, (cwd / "stderr-of-the-last.txt").read_text()[-3000:]
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def is_learning(losses: list[float]) -> bool:
    third = len(losses) // 3
    return all(0 < loss < 100 for loss in losses) and sum(losses[-third:]) < 0.9 * sum(losses[:third])


def flat(batches: Iterable[list[str]]) -> list[str]:
    return [key for batch in batches for key in batch]


def test_plain_pytorch_resumes_exactly(sharded: Sharded, tmp_path: Path, keys: list[str]) -> None:
    """PLAN-4, PLAN-5: 40 steps in one run, or 13 and the remainder, give bit-identical batches and losses."""
    whole = run("plain_pytorch.py", sharded.root, "--steps", 40, "--batch-size", 1, cwd=tmp_path)
    assert sorted(flat(whole["keys"][:34])) == keys and is_learning(whole["losses"])
    options = ("--batch-size", 1, "--checkpoint", "parts.pt")
    parts = [run("plain_pytorch.py", sharded.root, "--steps", steps, *options, cwd=tmp_path) for steps in (13, 40)]
    for name in ("keys", "losses"):
        assert parts[0][name] + parts[1][name] == whole[name]
    assert sorted(path.name for path in tmp_path.glob("*.pt*")) == ["parts.pt", "run.pt"]


def test_accelerate_keeps_the_loaders_place_in_its_own_checkpoints(
    sharded: Sharded, tmp_path: Path, keys: list[str]
) -> None:
    """PLAN-5: a run that ends between two checkpoints resumes from the last one, with the same samples and losses."""
    options = ("--batch-size", 1, "--accumulate", 2, "--save-every", 4)
    whole = run("accelerate_loop.py", sharded.root, *options, "--output", "whole", cwd=tmp_path)
    assert sorted(flat(whole["keys"])) == keys and is_learning(whole["losses"]) and whole["updates"] == 17
    part = start("accelerate_loop.py", sharded.root, *options, "--output", "part", "--stop-after", 10, cwd=tmp_path)
    assert finish(part, tmp_path)[0] == 1
    rest = run("accelerate_loop.py", sharded.root, *options, "--output", "part", cwd=tmp_path)
    assert rest["keys"] == whole["keys"][16:] and rest["losses"] == whole["losses"][16:]


def test_the_trainer_of_hugging_face_continues_an_epoch(sharded: Sharded, tmp_path: Path) -> None:
    """PLAN-5: 12 steps in one run, or 5 and the remainder, see the same samples; skipping batches of a bare loader
    raises an error that names the remedy."""
    whole = run("hf_trainer.py", sharded.root, "--steps", 12, "--output", "whole", cwd=tmp_path)
    parts = [
        run("hf_trainer.py", sharded.root, "--steps", steps, "--output", "part", cwd=tmp_path) for steps in (5, 12)
    ]
    assert parts[0]["keys"] + parts[1]["keys"] == whole["keys"] and len(whole["keys"]) == 12
    said = r"resume with load_state_dict\(\) instead"
    loader = streamvid.VideoLoader(sharded.root, batch_size=1, num_workers=0)
    with loader, pytest.raises(AttributeError, match=said):
        skip_first_batches(loader, 3)


def notes(output: Path, first: int, after: int, until: float) -> list[dict[str, Any]]:
    """Return what the ranks of the run that began after step `first` recorded of steps after `after`, up to `until`."""
    found = []
    for path in output.glob(f"samples-from{first}-rank*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        found += [json.loads(line) for line in lines if line.endswith("\n")]
    return [note for note in found if after < note["step"] <= until]


@pytest.mark.parametrize("num_ranks", [pytest.param(count, marks=pytest.mark.slow) for count in (3, 2)])
def test_other_ranks_resume_after_a_torchrun_rank_is_killed(
    sharded: Sharded, tmp_path: Path, keys: list[str], num_ranks: int
) -> None:
    """PLAN-2, PLAN-4, PLAN-5: after SIGKILL of one of two ranks, two or three ranks resume, and each sample comes once.

    The test counts the steps up to the last checkpoint and all steps of the next run, without the marked repeats of
    "pad".
    """
    options, output = ("--output", "run", "--epochs"), tmp_path / "run"
    process = start("torchrun_ddp.py", sharded.root, *options, 100, cwd=tmp_path, launcher=(*TORCHRUN, 2))
    journal = output / "samples-from0-rank1.jsonl"
    while process.poll() is None and not (journal.exists() and len(journal.read_text().splitlines()) > 7):
        time.sleep(0.01)
    os.kill(json.loads(journal.read_text().splitlines()[0])["pid"], signal.SIGKILL)
    assert finish(process, tmp_path)[0] != 0
    saved = last_saved_step(output)
    num_epochs = 1 + max(note["epoch"] for note in notes(output, 0, 0, saved))
    done = run("torchrun_ddp.py", sharded.root, *options, num_epochs, cwd=tmp_path, launcher=(*TORCHRUN, num_ranks))
    assert done["ranks"] == num_ranks and done["epoch"] == num_epochs
    trained = notes(output, 0, 0, saved) + notes(output, saved, saved, float("inf"))
    assert Counter(note["step"] for note in trained) == {
        step: 2 if step <= saved else num_ranks for step in range(1, done["step"] + 1)
    }
    fresh = sorted(
        (note["epoch"], key)
        for note in trained
        for key, is_repeat in zip(note["keys"], note["is_repeat"], strict=True)
        if not is_repeat
    )
    assert fresh == [(epoch, key) for epoch in range(num_epochs) for key in keys]
    # The last line has the keys of rank 0 without repeats, and the finished run is saved.
    assert {(key, epoch) for epoch, key in fresh} >= {(key, num_epochs - 1) for key in done["keys"][-1]}
    assert len(done["losses"]) == done["step"] - saved and last_saved_step(output) == done["step"]
    again = run("torchrun_ddp.py", sharded.root, *options, num_epochs, cwd=tmp_path, launcher=(*TORCHRUN, num_ranks))
    assert again == done | {"keys": [], "losses": []}


def last_saved_step(output: Path) -> int:
    import torch

    step: int = torch.load(output / "checkpoint.pt")["step"]
    return step


@pytest.mark.parametrize(
    "steps",
    [
        17,
        # A checkpoint after an epoch's last batch, at which Lightning itself stores no position in the data.
        pytest.param(34, marks=pytest.mark.slow),
    ],
)
def test_lightning_resumes_from_its_checkpoint(sharded: Sharded, tmp_path: Path, keys: list[str], steps: int) -> None:
    """PLAN-4, PLAN-5: Trainer.fit stops at a checkpoint, and a new process continues to the end of the next epoch."""
    options = ("--batch-size", 1, "--save-every", 17)
    parts = [
        run("lightning_module.py", sharded.root, *options, *more, cwd=tmp_path)
        for more in (("--epochs", 9, "--steps", steps), ("--epochs", 2))
    ]
    assert [part["step"] for part in parts] == [steps, 68]
    seen = [(epoch, key) for part in parts for epoch, batch in part["keys"] for key in batch]
    assert sorted(seen) == [(epoch, key) for epoch in range(2) for key in keys]
    assert is_learning([loss for part in parts for loss in part["losses"]])


def test_a_loop_in_open_sora_style(sharded: Sharded, tmp_path: Path, keys: list[str]) -> None:
    """PLAN-4, PLAN-5, with one batch prefetched: the saved state is that of the batch trained on, not of the prefetched
    one."""
    options = ("--batch-size", 1, "--epochs", 2)
    assert finish(start("opensora_loop.py", sharded.root, *options, "--stop", 5, cwd=tmp_path), tmp_path)[0] == 1
    rest = run("opensora_loop.py", sharded.root, *options, cwd=tmp_path)
    with streamvid.VideoLoader(sharded.root, batch_size=1, seed=1024) as loader:
        first = [(0, batch.sample_keys[0]) for batch in islice(loader, 5)]
    seen = first + [(epoch, key) for epoch, batch in rest["keys"] for key in batch]
    assert sorted(seen) == [(epoch, key) for epoch in range(2) for key in keys]
    sources = streamvid.open_dataset(sharded.root).samples_table()["source"].to_pylist()
    assert set(flat(rest["paths"])) == set(sources)
    assert is_learning(rest["losses"])
    facts = {name: values[0] for name, values in rest["facts"].items()}
    assert sorted(facts) == ["ar", "fps", "height", "num_frames", "width"]
    assert facts["ar"] == pytest.approx(facts["height"] / facts["width"]) and facts["fps"] > 0


def test_a_script_in_diffusers_style(sharded: Sharded, tmp_path: Path, keys: list[str]) -> None:
    """diffusers' scheduler and transformer train on our batches, and save_pretrained writes the model."""
    done = run("diffusers_style.py", sharded.root, "--steps", 10, "--max-tokens", 1700, cwd=tmp_path)
    assert len(done["keys"]) == 10 and set(flat(done["keys"])) <= set(keys)
    assert is_learning(done["losses"])
    buckets = {bucket.id: bucket for bucket in streamvid.open_dataset(sharded.root).manifest.buckets}
    for bucket_id, latents in done["latents"]:
        frames, height, width = buckets[bucket_id].shape
        assert latents == [3, 1 + (frames - 1) // 4, height // 8, width // 8]
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "WanTransformer3DModel"
    assert (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size > 10_000


def test_a_webdataset_pipeline_with_our_decoder(sharded: Sharded, tmp_path: Path, keys: list[str]) -> None:
    """webdataset finds every sample of our shards, and decode_into gives each one the shape of its bucket."""
    done = run("webdataset_decoder.py", sharded.root, "--batch-size", 2, cwd=tmp_path)
    assert sorted(flat(done["keys"])) == keys and is_learning(done["losses"])
    shapes = {bucket.shape for bucket in streamvid.open_dataset(sharded.root).manifest.buckets}
    assert {tuple(shape[1:]) for shape in done["shapes"]} == shapes


def test_every_example_is_short_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"[{path.name}]({path.name})" in listed
        assert len(path.read_text().splitlines()) <= 125, path
        tested = Path(__file__).read_text() + (Path(__file__).parent / "trainer" / "test_outputs.py").read_text()
        # A task is not a script; the training run that uses it is in test_outputs.py.
        assert f'run("{path.name}"' in tested or f'"task": "{path.stem}:' in tested, f"no test runs {path.name}"
