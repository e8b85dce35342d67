"""Tests of the preflight's memory estimate against the measured peak of a step on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamvid.trainer.preflight.check import check
from tests.clips import encode, frames_of
from tests.conftest import run_streamvid
from tests.recipes.test_fine_tuning import resolved
from tests.recipes.tiny import wan_text, wan_transformer, wan_vae

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    # torch warns about diffusers' RMSNorm, whose weights are float32 under autocast.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight blocks as wide as those of Wan 2.1 1.3B: 0.25 billion parameters, large compared with CUDA's libraries."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    folder = tmp_path_factory.mktemp("wide") / "model"
    folder.mkdir()
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    with torch.device("cuda"):
        transformer = wan_transformer(num_attention_heads=12, attention_head_dim=128, ffn_dim=4096, num_layers=8)
    pipe = WanPipeline(vae=wan_vae(), scheduler=scheduler, transformer=transformer, **wan_text(folder))
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clips")
    (root / "videos").mkdir()
    for count in (5, 9, 33):
        (root / "videos" / f"{count}.mp4").write_bytes(encode(frames_of("bikes", 256, 256, count), fps=16))
    buckets = ("--buckets", "256x256@5,256x256@9,256x256@33", "--fps", "16", "--fps-rule", "resample")
    run_streamvid("shard", root / "videos", root / "ds", *buckets, "--workers", "1")
    return root / "ds"


@pytest.mark.parametrize("blocks", ["[]", "[auto]"])
@pytest.mark.parametrize("kind", ["--lora", "full"])
def test_the_estimate_is_within_15_percent_of_the_peak(model: Path, dataset: Path, kind: str, blocks: str) -> None:
    kinds = ("--lora",) if kind == "--lora" else ()
    checkpointing = f"model.activation_checkpointing.blocks={blocks}"
    words = ("--recipe", "wan2.1", "--model", model, "--dataset", dataset, "--output", dataset.parent / "run")
    report = check(resolved(*words, *kinds, "--set", "data.num_workers=0", "--set", checkpointing))
    (estimate,) = [row.needed_bytes for row in report.buckets if row.bucket_id == report.largest]
    assert report.peak_bytes == pytest.approx(estimate, rel=0.15)
    assert report.peak_bytes is not None and report.peak_bytes > 10**9
