from __future__ import annotations

import pytest
import torch
from torch import nn

from streamvid.errors import ConfigError
from streamvid.loader.options import Layout
from streamvid.recipes.small import SmallTraining, build
from streamvid.recipes.small.codec import PatchCodec
from streamvid.recipes.small.text_encoder import BYTES_WIDTH
from tests.processes import run_python
from tests.recipes.small_batches import encoded, make_batch, wake

TINY = {"dim": 24, "depth": 2, "heads": 4}
CODECS = [{"codec": "patch", "patch": [2, 4, 4]}, {"codec": "autoencoder"}]


def awake(**settings: object) -> SmallTraining:
    module = build(**TINY, **settings)
    wake(module.transformer)
    return module


def test_the_seed_decides_the_weights_and_global_randomness_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = build(**TINY, seed=3), build(**TINY, seed=3), build(**TINY, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.transformer.embed.weight, other.transformer.embed.weight)


@pytest.mark.parametrize("settings", CODECS, ids=lambda settings: settings["codec"])
@pytest.mark.parametrize("size", [(1, 16, 16), (5, 24, 16), (6, 13, 21)])
def test_one_module_encodes_learns_from_and_samples_every_bucket(
    settings: dict[str, object], size: tuple[int, int, int]
) -> None:
    module, batch = awake(**settings, sample_steps=2), make_batch(size)
    ready = encoded(module, batch)
    assert ready.latents.shape[0] == 2
    loss = module(ready)["loss"]
    assert loss.shape == (2,) and loss.dtype == torch.float32
    loss.mean().backward()
    assert all(p.grad is not None for p in module.transformer.parameters())
    for made in (module.sample(ready), module.sample(batch)):
        assert made.shape == (2, 3, *size) and made.dtype == torch.uint8
    assert torch.equal(module.sample(ready), module.sample(batch))


@pytest.mark.parametrize("settings", CODECS, ids=lambda settings: settings["codec"])
def test_a_sample_has_the_same_loss_and_latents_whatever_batch_it_is_in(settings: dict[str, object]) -> None:
    module = awake(**settings)
    batch = make_batch(text=("one", "a longer caption", ""))
    whole = encoded(module, batch)
    for row in range(3):
        cut = {name: batch[name][row : row + 1] for name in ("video", "text", "sample_seeds")}
        part = encoded(module, batch.with_fields(cut))
        assert torch.equal(part.latents, whole.latents[row : row + 1])
        assert torch.equal(part.text_states[0], whole.text_states[row][whole.text_states_mask[row]])
        assert torch.allclose(module(part)["loss"], module(whole)["loss"][row : row + 1], rtol=1e-5)


@pytest.mark.parametrize("layout", ["BTCHW", "BTHWC"])
def test_the_layout_of_the_loader_makes_no_difference(layout: Layout) -> None:
    module = awake(codec="patch", patch=[2, 4, 4])
    assert torch.equal(
        module.encode(make_batch(layout=layout))["latents"],  # type: ignore[arg-type]
        module.encode(make_batch())["latents"],  # type: ignore[arg-type]
    )


def test_latents_of_the_patch_codec_are_the_pixels() -> None:
    module, batch = awake(codec="patch", patch=[2, 4, 4]), make_batch((5, 14, 9))
    latents = module.encode(batch)["latents"]
    assert isinstance(latents, torch.Tensor)
    video = PatchCodec((2, 4, 4)).decode(latents, (5, 14, 9))
    assert torch.equal(((video + 1) * 127.5).round().to(torch.uint8), batch.video)


@pytest.mark.parametrize("settings", CODECS, ids=lambda settings: settings["codec"])
def test_training_on_stored_features_builds_no_encoder_and_has_the_same_losses(
    settings: dict[str, object],
) -> None:
    module, batch = awake(**settings, sample_steps=2, guidance=2.0), make_batch()
    split = build(task="sft:train", **TINY, **settings, sample_steps=2, guidance=2.0)
    split.load_state_dict(module.state_dict(), strict=False)
    assert [name for name, _ in split.named_children()] == ["transformer"]
    ready = encoded(module, batch)
    without_video = {name: value for name, value in ready.items() if name != "video"}
    stored = type(ready)(without_video)
    assert torch.equal(split(stored)["loss"], module(ready)["loss"])
    assert torch.equal(split.sample(stored), module.sample(ready))
    assert torch.equal(split.encode_null()["text_states"], module.encode_null()["text_states"])


def test_encoders_are_frozen_and_stay_in_eval_mode() -> None:
    module = build(**TINY, codec="autoencoder")
    assert module.encoders == ("autoencoder", "text_encoder")
    module.train()
    assert module.transformer.training
    for name in module.encoders:
        child = getattr(module, name)
        assert not child.training and not any(p.requires_grad for p in child.parameters())
    assert all(p.requires_grad for p in module.transformer.parameters())


def test_the_null_text_equals_an_encoded_empty_text() -> None:
    module = awake(patch=[2, 4, 4])
    ready = encoded(module, make_batch(text=("", "a red bike")))
    null = module.encode_null()["text_states"]
    assert null.shape == (1, BYTES_WIDTH)
    assert torch.equal(ready.text_states[0][ready.text_states_mask[0]], null)


def test_validation_reports_the_loss_without_text_on_the_same_noise() -> None:
    module, batch = awake(patch=[2, 4, 4]), make_batch()
    told, untold = encoded(module, batch), encoded(module, batch.with_fields({"text": ["", ""]}))
    found = module.validate(told)
    assert torch.equal(found["loss"], module(told)["loss"])
    assert torch.allclose(found["loss_without_text"], module(untold)["loss"], rtol=1e-5)
    assert not torch.allclose(found["loss"][0], found["loss_without_text"][0], rtol=1e-3)
    assert not found["loss"].requires_grad


def test_guidance_of_one_is_no_guidance_and_more_follows_the_text_further() -> None:
    batch = make_batch(text=("a red bike", "a blue car"))
    plain, guided, unguided = (awake(patch=[2, 4, 4], sample_steps=3, guidance=g) for g in (1.0, 3.0, 0.0))
    untold = batch.with_fields({"text": ["", ""]})
    assert torch.equal(unguided.sample(batch), plain.sample(untold))
    distances = [(m.sample(batch).float() - plain.sample(untold)).abs().mean() for m in (plain, guided)]
    assert distances[1] > distances[0] > 0


def test_losses_stay_in_single_precision_under_autocast() -> None:
    module = awake(patch=[2, 4, 4])
    ready = encoded(module, make_batch())
    exact = module(ready)["loss"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = module(ready)["loss"]
    assert half.dtype == torch.float32
    assert torch.allclose(half, exact, rtol=0.02)


def test_the_model_learns_one_clip_by_heart() -> None:
    """The whole path from pixels to gradients works: the loss on one clip falls below half of its start."""
    module = build(dim=48, depth=2, heads=4, patch=[1, 4, 4])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    ready = encoded(module, make_batch((1, 16, 16)))
    seeds = torch.arange(2)

    def held_out() -> float:
        return float(
            torch.stack(
                [module.validate(ready.with_fields(_seeds(seeds + 10**6 + i)))["loss"] for i in range(0, 40, 2)]
            ).mean()
        )

    before = held_out()
    for step in range(250):
        module(ready.with_fields(_seeds(seeds + 2 * step)))["loss"].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before > 1.2
    assert held_out() < 0.5 * before


def _seeds(values: torch.Tensor) -> dict[str, list[int]]:
    return {"sample_seeds": values.tolist()}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dims": 3}, "no field 'dims'; did you mean 'dim'"),
        ({"codec": "vae"}, "codec='vae': must be 'patch' or 'autoencoder'"),
        ({"autoencoder": "x.safetensors"}, "omit autoencoder"),
        ({"codec": "autoencoder", "autoencoder": "no/such.safetensors"}, "no/such.safetensors"),
        ({"dim": 30, "heads": 4}, "dim is 30"),
        ({"depth": 0}, "depth=0: must be an integer of at least 1"),
        ({"patch": [1, 8]}, "patch is"),
        ({"patch": [1, 0, 8]}, "patch is"),
        ({"time_shift": 0.0}, "time_shift is 0.0"),
        ({"guidance": float("nan")}, "guidance=nan: must be a number"),
        ({"text": "t5"}, "'t5'"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(**settings)


def test_importing_the_package_imports_no_heavy_library() -> None:
    code = "import sys, streamvid.modules; print(sorted({'torch', 'transformers', 'peft', 'accelerate'} & set(sys.modules)))"
    done = run_python(code)
    assert done.stdout.strip() == "[]"


def test_the_module_imports_transformers_only_where_an_encoder_needs_it() -> None:
    code = "import sys, streamvid.recipes.small as s; s.build(dim=12, depth=1); print('transformers' in sys.modules)"
    done = run_python(code)
    assert done.stdout.strip() == "False"
    assert isinstance(build(dim=12, depth=1), nn.Module)
