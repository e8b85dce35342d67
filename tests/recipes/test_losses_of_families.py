"""Tests of every family's loss on fixed latents, texts, noise and times, against official training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamvid.modules.factory import import_object
from streamvid.recipes.diffusion.times import NoiseDraw
from streamvid.recipes.registry import RECIPES
from tests.recipes.official import STEPS, Case
from tests.recipes.small_batches import make_batch
from tests.recipes.tiny import MODELS, make_model

# Latent shapes (t, h, w) of three buckets, one of which is an image. CogVideoX 1.5 merges pairs of frames.
SHAPES = [(3, 4, 6), (1, 6, 4), (2, 8, 8)]
# These models are given the first frame of a video, so they cannot train on images.
SHAPES_OF = {"hunyuanvideo-replace-i2v": [(3, 4, 6), (4, 6, 4), (2, 8, 8)]}
TIMES = [0.93, 0.41, 0.07]
# With these settings, one batch uses both branches of a model.
SETTINGS: dict[str, dict[str, Any]] = {
    "wan2.2": {"expert": "both"},
    "wan2.2-i2v": {"expert": "both"},
    "wan2.2-5b": {"first_frame": 0.5},
}

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")


def recipe_of(name: str) -> str:
    """Return the recipe that trains a tiny model; the model's name may add a variant."""
    return max((recipe for recipe in RECIPES if name.startswith(recipe)), key=len)


def built(name: str, folder: Path, task: str = "sft", **settings: Any) -> Any:
    model = make_model(name, folder / name)
    build = import_object(RECIPES[recipe_of(name)].factory)
    return build(task=task, model=str(model), encoder_dtype="float32", **settings)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text_fields(name: str, count: int) -> dict[str, Tensor]:
    """Return random encoded texts of unequal lengths."""
    recipe = recipe_of(name)
    lengths = {"ltx-video": 128, "mochi": 256, "hunyuanvideo": 24, "hunyuanvideo1.5": 24}
    if recipe.startswith("ltx-2"):
        texts = {"video_text": normal(count, 9, 16, seed=3), "audio_text": normal(count, 9, 16, seed=4)}
        return {**texts, "text_attention": (torch.arange(9)[None] < torch.arange(3, 3 + count)[:, None]).long()}
    length = lengths.get(recipe, 16 if recipe.startswith("cogvideox") else 7)
    mask = (torch.arange(length)[None] < torch.arange(3, 3 + count)[:, None]).long()
    fields = {"prompt_embeds": normal(count, length, 16, seed=3)}
    if recipe in lengths and recipe != "hunyuanvideo1.5":
        fields["prompt_attention_mask"] = mask.bool() if recipe == "mochi" else mask
    if recipe == "hunyuanvideo":
        fields["pooled_prompt_embeds"] = normal(count, 8, seed=4)
    if recipe == "hunyuanvideo1.5":
        fields |= {"prompt_embeds_mask": mask, "prompt_embeds_2": normal(count, 8, 16, seed=5)}
        fields["prompt_embeds_mask_2"] = (torch.arange(8)[None] < torch.arange(count)[:, None]).long()
    return fields


def conditions(name: str, count: int, shape: tuple[int, int, int], num_channels: int) -> dict[str, Tensor]:
    """Return random latents and states of first frames for image-to-video models, or of control inputs."""
    if name == "wan-vace":
        return {"control": normal(count, 2 * num_channels + 64, shape[0] + 1, *shape[1:], seed=6)}
    if not name.endswith("i2v"):
        return {}
    # Wan conditions on the latents of a whole clip, the others on those of an image.
    frames = shape[0] if name.startswith("wan") else 1
    fields = {"condition": normal(count, num_channels, frames, *shape[1:], seed=6)}
    width = {"wan2.1-i2v": 16, "hunyuanvideo1.5-i2v": 8}.get(name)
    return fields if width is None else {**fields, "image_embeds": normal(count, 5, width, seed=7)}


def channels(module: Any) -> int:
    return int(module.denoiser.config.out_channels or module.denoiser.config.in_channels)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_equals_that_of_the_official_training_step(name: str, tmp_path: Path) -> None:
    module = built(name, tmp_path, "sft:train", **SETTINGS.get(name, {}))
    count = len(TIMES)
    given = torch.tensor([module.takes_first_frame(), False, False])
    for shape in SHAPES_OF.get(name, SHAPES):
        latents = normal(count, channels(module), *shape, seed=1)
        fields = {**text_fields(name, count), **conditions(name, count, shape, channels(module))}
        batch = make_batch(text=("",) * count).with_fields({"latents": latents, **fields})
        noise = normal(*module.latents_of(batch).shape, seed=2)
        now = torch.ones_like(given) if name in SHAPES_OF else given & (shape[0] > 1)
        drawn = NoiseDraw(noise, torch.tensor(TIMES), torch.zeros(count), now)
        with torch.no_grad():
            ours = module.losses(batch, drawn)
            official = [
                STEPS[name](
                    Case(
                        module,
                        latents[row : row + 1],
                        noise[row : row + 1],
                        TIMES[row],
                        {field: value[row : row + 1] for field, value in {**fields, "fps": batch.fps}.items()},
                        bool(now[row]),
                    )
                )
                for row in range(count)
            ]
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), torch.tensor(official).double(), rtol=1e-5, atol=0)
        assert float(ours.std()) > 0
