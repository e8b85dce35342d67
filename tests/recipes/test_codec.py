from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.recipes.small.codec import PatchCodec, grid_size, patchify, unpatchify

sizes = st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 20))
patches = st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))


@settings(deadline=None)
@given(
    size=sizes,
    patch=patches,
    batch=st.integers(1, 3),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.bfloat16]),
    channels_last=st.booleans(),
)
def test_decode_restores_every_value(
    size: tuple[int, int, int], patch: tuple[int, int, int], batch: int, dtype: torch.dtype, channels_last: bool
) -> None:
    video = torch.randint(256, (batch, 3, *size), generator=torch.Generator().manual_seed(0)).to(dtype)
    if channels_last:
        video = video.to(memory_format=torch.channels_last_3d)
    before, codec = video.clone(), PatchCodec(patch)
    latents = codec.encode(video)
    assert latents.shape == (batch, *codec.latent_shape(size))
    assert latents.dtype == dtype
    assert torch.equal(codec.decode(latents, size), video)
    tokens = patchify(video, patch)
    t, h, w = grid_size(size, patch)
    assert tokens.shape == (batch, t * h * w, 3 * patch[0] * patch[1] * patch[2])
    assert torch.equal(unpatchify(tokens, size, patch), video)
    assert torch.equal(video, before)


def test_a_token_is_one_patch_in_order_t_h_w() -> None:
    video = torch.arange(2 * 4 * 6).reshape(1, 1, 2, 4, 6)
    tokens = patchify(video, (1, 2, 3))
    assert tokens[0, 0].tolist() == [0, 1, 2, 6, 7, 8]
    assert tokens[0, 1].tolist() == [3, 4, 5, 9, 10, 11]
    assert tokens[0, 4].tolist() == [24, 25, 26, 30, 31, 32]


def test_a_latent_has_the_position_of_its_patch() -> None:
    video = torch.arange(2 * 4 * 6).reshape(1, 1, 2, 4, 6)
    latents = PatchCodec((1, 2, 3), channels=1).encode(video)
    assert latents.shape == (1, 6, 2, 2, 2)
    assert latents[0, :, 0, 0, 1].tolist() == [3, 4, 5, 9, 10, 11]
    assert latents[0, :, 1, 0, 0].tolist() == [24, 25, 26, 30, 31, 32]


def test_an_indivisible_size_is_padded_with_its_last_value() -> None:
    tokens = patchify(torch.tensor([1, 2, 3]).reshape(1, 1, 3, 1, 1), (2, 1, 1))
    assert tokens.tolist() == [[[1, 2], [3, 3]]]


@pytest.mark.parametrize("size", [(1, 1, 1), (5, 7, 9), (3, 2, 1)])
def test_padding_repeats_the_last_frame_row_and_column(size: tuple[int, int, int]) -> None:
    video, codec = torch.rand(1, 3, *size), PatchCodec((4, 4, 4))
    covered = (-(-size[0] // 4) * 4, -(-size[1] // 4) * 4, -(-size[2] // 4) * 4)
    t, h, w = (torch.arange(n).clamp(max=s - 1) for n, s in zip(covered, size, strict=True))
    assert torch.equal(codec.decode(codec.encode(video), covered), video[:, :, t][:, :, :, h][:, :, :, :, w])
