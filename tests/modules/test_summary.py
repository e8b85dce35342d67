"""Tests of the table at the start of a run."""

from __future__ import annotations

import torch
from torch import nn

from streamvid.modules import fp8
from streamvid.modules.summary import format_table, summarize, total
from tests.modules import modules


def test_each_model_has_a_row_with_its_true_numbers() -> None:
    module = modules.build(dim=8)
    module.dit.requires_grad_(False)
    module.dit.head.to(torch.bfloat16).requires_grad_(True)
    module.scale = nn.Parameter(torch.ones(3))
    found = summarize(module)
    rows = {row.name: row for row in found}
    assert list(rows) == ["(own)", "dit", "refiner", "autoencoder"]
    for name, part in module.named_children():
        numbers = [p.numel() for p in part.parameters()]
        tensors = [*part.parameters(), *part.buffers()]
        assert rows[name].kind == type(part).__name__
        assert rows[name].num_parameters == sum(numbers)
        assert rows[name].num_trainable == sum(p.numel() for p in part.parameters() if p.requires_grad)
        assert rows[name].num_bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert rows["dit"].dtypes == ("float32", "bfloat16")
    assert total(found).num_parameters == sum(p.numel() for p in module.parameters())
    assert total(found).num_trainable == sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_shared_weights_count_once_and_fp8_weights_as_parameters() -> None:
    pair = modules.Pair().requires_grad_(False)
    fp8.store(pair, ["teacher"])
    rows = {row.name: row for row in summarize(pair)}
    assert rows["tied"].num_parameters == 7 * 5
    assert rows["teacher"].num_parameters == rows["student"].num_parameters
    assert rows["teacher"].dtypes == ("float8_e4m3fn", "float32")
    assert rows["teacher"].num_bytes == 2 * (16 + 4 * 4 + 4 * 4)


def test_the_table_is_readable() -> None:
    text = format_table(summarize(modules.build(dim=64)))
    lines = text.splitlines()
    assert lines[0].split() == ["model", "class", "parameters", "trainable", "bytes", "dtype"]
    assert lines[1].split() == ["dit", "Denoiser", "68,428", "68,428", "274.0", "kB", "float32"]
    assert lines[-1].startswith("sum")
    assert len({line.index("float32") for line in lines[1:-1]}) == 1
