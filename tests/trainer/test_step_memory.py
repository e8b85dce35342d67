"""Tests of the memory estimate of a step from its phases, and of the advice on how to reduce it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streamvid.trainer.preflight.advice import advice
from streamvid.trainer.preflight.memory import ActivationPlane, Activations, EncodedBatch, FixedMemory, StepMemory
from tests.trainer.configs import train_config

#: 20 blocks. A sample of 10 tokens has 2000 bytes of activations, of which 100 are block inputs.
STEP = StepMemory(
    fixed=FixedMemory(weights=1000, encoders=400, gradients=80, optimizer=160, update=80),
    activations=Activations(ActivationPlane(0, 0, 200), ActivationPlane(0, 0, 10), num_blocks=20),
    size=2,
    tokens=10,
    measured=EncodedBatch(bytes=60, peak_bytes=300),
    measured_size=2,
    is_checkpointed=False,
    encodes=True,
    accumulates=False,
)
HELD = 1000 + 160


def test_a_step_needs_its_largest_phase() -> None:
    """A block has 200 bytes. Backward needs 4000 + 0.7 · 200 bytes, or 200 + 1.7 · 200 with activation
    checkpointing."""
    assert STEP.needed == HELD + 60 + 4140
    checkpointed = replace(STEP, is_checkpointed=True)
    assert checkpointed.needed == HELD + 60 + 540
    assert replace(checkpointed, measured=EncodedBatch(60, 900)).needed == HELD + 900
    assert replace(checkpointed, measured=EncodedBatch(60, 900), encodes=False).needed == HELD + 60 + 540
    many = replace(STEP.fixed, gradients=800, update=800)
    assert replace(checkpointed, fixed=many).needed == HELD + 60 + 1600
    assert replace(checkpointed, fixed=replace(many, update=0)).needed == HELD + 60 + 1000
    assert replace(checkpointed, fixed=many, accumulates=True).needed == HELD + 60 + 1600
    assert replace(STEP, fixed=many, accumulates=True).needed == HELD + 800 + 60 + 4140


def test_a_larger_batch_needs_more_memory_only_for_its_samples() -> None:
    """Copies of weights in bfloat16 exist once per step, and encoders take one clip at a time, so neither scales."""
    activations = replace(STEP.activations, stored=ActivationPlane(500, 10, 200), num_blocks=0)
    assert replace(STEP, activations=activations).backward == 500 + 2 * 2010
    assert replace(STEP, activations=activations, size=3).backward == 500 + 3 * 2010
    encoding = replace(STEP, is_checkpointed=True, measured=EncodedBatch(60, 5000))
    assert replace(encoding, size=4).needed == HELD + 120 + 4940


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (HELD + 4199, ["activation_checkpointing.blocks=[auto]", "--task sft:data_process", "'b': 1", "--lora"]),
        (HELD + 600, ["activation_checkpointing.blocks=[auto]"]),
        (HELD + 300, ["activation_checkpointing.blocks=[auto]", "and encode once"]),
        (HELD - 50, ["[auto]", "and encode once", "and a smaller batch for this bucket: data.batch_size={'b': 1"]),
        (1, ["[auto]", "and encode once", "and a smaller batch", "and train adapters (--lora)", "FSDP"]),
    ],
)
def test_advice_names_sufficient_options_alone_or_combined(tmp_path: Path, limit: int, expected: list[str]) -> None:
    found = advice(train_config("ds", tmp_path), "b", STEP, limit)
    assert len(found) == len(expected), found
    for text, part in zip(found, expected, strict=True):
        assert part in text


def test_advice_for_adapters_is_fp8(tmp_path: Path) -> None:
    config = train_config("ds", tmp_path, {"model.lora.base_model": "dit"})
    step = replace(STEP, is_checkpointed=True, encodes=False, size=1)
    assert advice(config, "b", step, step.needed - 1) == ("frozen weights in FP8: --set model.fp8=[dit]",)
