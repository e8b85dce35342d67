"""Tests of weight files: verified before loading, assigned to the models that they fit, and saved to be loaded
again."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules import lora, saving, weights
from streamvid.modules.config import LoraConfig, WeightsConfig
from streamvid.modules.weight_files import ROOT_VARIABLES, fingerprints, read_state, resolve
from tests.dataset.test_sidecar import HOSTILE
from tests.modules import modules
from tests.modules.modules import differing, state_of
from tests.processes import run_python, serving

State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def no_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ROOT_VARIABLES, "DIFFSYNTH_SKIP_DOWNLOAD", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def made(seed: int, **arguments: Any) -> nn.Module:
    torch.manual_seed(seed)
    return modules.build(**arguments)


def shards(state: State, folder: Path, count: int) -> list[str]:
    """Write the tensors to `count` files and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for place in range(count):
        path = folder / f"model-{place + 1:05}-of-{count:05}.safetensors"
        save_file(dict(list(state.items())[place::count]), path)
        paths.append(str(path))
    return paths


def load(module: nn.Module, may_lack: tuple[str, ...] | None = (), **fields: Any) -> dict[str, str]:
    config = WeightsConfig(**fields)
    return weights.load(module, resolve(config), config, may_lack=may_lack)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_weight_file_with_a_hostile_header_is_refused(tmp_path: Path, data: bytes) -> None:
    """SAFE-1: the file is refused, or its tensors take no more bytes than the file has."""
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    try:
        tensors = read_state([path])
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) <= len(data)


def test_files_including_shards_and_pickles_load_into_the_children_that_they_fit(tmp_path: Path) -> None:
    """Row 14: nested lists are shards of one model; other parts of the module keep their initial weights."""
    source, module = made(1), made(2)
    torch.save(source.autoencoder.state_dict(), tmp_path / "vae.pth")
    dit = shards(source.dit.state_dict(), tmp_path / "dit", 3)
    before = state_of(module)
    went = load(module, paths=(str(tmp_path / "vae.pth"), tuple(dit)))
    assert went == {str(tmp_path / "vae.pth"): "autoencoder", **dict.fromkeys(dit, "dit")}
    assert not differing(module.dit.state_dict(), source.dit.state_dict())
    assert not differing(module.autoencoder.state_dict(), source.autoencoder.state_dict())
    assert not differing(module.refiner.state_dict(), made(2).refiner.state_dict())
    assert differing(module.state_dict(), before) >= set(before) - {n for n in before if "norm" in n or "refiner" in n}


@pytest.mark.parametrize("prefix", ["", "dit.", "pipe.dit.", "model.", "module."])
def test_keys_may_have_a_prefix(tmp_path: Path, prefix: str) -> None:
    source, module = made(1), made(2)
    state = {prefix + name: tensor for name, tensor in source.dit.state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    assert load(module, paths=(str(tmp_path / "a.safetensors"),)) == {str(tmp_path / "a.safetensors"): "dit"}
    assert not differing(module.dit.state_dict(), source.dit.state_dict())
    again = made(3)
    load(again, paths=(str(tmp_path / "a.safetensors"),), allow_missing=True, allow_unexpected=True)
    assert not differing(again.dit.state_dict(), source.dit.state_dict())
    assert not differing(again.refiner.state_dict(), made(3).refiner.state_dict())


def test_a_file_may_contain_the_whole_module(tmp_path: Path) -> None:
    source, module = made(1), made(2)
    torch.save({"state_dict": source.state_dict(), "step": 3}, tmp_path / "all.ckpt")
    assert load(module, paths=(str(tmp_path / "all.ckpt"),)) == {str(tmp_path / "all.ckpt"): ""}
    assert not differing(module.state_dict(), source.state_dict())


def test_all_mistakes_in_paths_are_reported_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.pth").touch()
    save_file(made(0).dit.state_dict(), tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    bad = [tmp_path / name for name in ("no.safetensors", "no-*.pth", "folder", "empty.pth", "cut.safetensors")]
    origins = "org/model:*.bin,no-colon"
    with pytest.raises(ConfigError) as raised:
        resolve(WeightsConfig(paths=(*map(str, bad), ()), id_with_origin_paths=origins, root=tmp_path / "root"))
    said = str(raised.value)
    for path in bad:
        assert str(path) in said
    assert "does not exist" in said
    assert "matches no file" in said
    assert "folder/*.safetensors" in said
    assert "cannot be read as a safetensors file" in said
    assert "an empty list" in said
    assert f"'org/model:*.bin' matches no file below {tmp_path / 'root' / 'org/model'}" in said
    assert "id_with_origin_paths contains 'no-colon'; allowed: ID:GLOB" in said


def test_globs_below_a_root_are_one_model_each_and_mix_with_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 15 and 16; the root comes from the field, an environment variable, or ./models, in this order."""
    source = made(1)
    for root in ("field", "streamvid", "diffsynth", "models"):
        shards(source.dit.state_dict(), tmp_path / root / "org" / "video:1.3B", 2)
    torch.save(source.refiner.state_dict(), tmp_path / "refiner.pth")
    origins = " org/video:1.3B:model-*.safetensors , "
    monkeypatch.chdir(tmp_path)

    def root_of(**fields: Any) -> Path:
        sources = resolve(WeightsConfig(id_with_origin_paths=origins, paths=(str(tmp_path / "refiner.pth"),), **fields))
        assert [len(source.files) for source in sources] == [1, 2]
        return sources[1].files[0].parents[2]

    assert root_of() == Path("models")
    monkeypatch.setenv("DIFFSYNTH_MODEL_BASE_PATH", str(tmp_path / "diffsynth"))
    assert root_of() == tmp_path / "diffsynth"
    monkeypatch.setenv("STREAMVID_MODEL_ROOT", str(tmp_path / "streamvid"))
    assert root_of() == tmp_path / "streamvid"
    assert root_of(root=tmp_path / "field") == tmp_path / "field"
    module = made(2)
    went = load(module, id_with_origin_paths=origins, paths=(str(tmp_path / "refiner.pth"),))
    assert set(went.values()) == {"dit", "refiner"}
    assert not differing(module.dit.state_dict(), source.dit.state_dict())


def test_a_model_that_is_listed_twice_loads_the_first_entry_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, module = made(1), made(2), made(3)
    save_file(first.dit.state_dict(), tmp_path / "a.safetensors")
    save_file(second.dit.state_dict(), tmp_path / "b.safetensors")
    a, b = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    assert len(resolve(WeightsConfig(paths=(a, a)))) == 1
    load(module, paths=(a, a, b))
    assert not differing(module.dit.state_dict(), first.dit.state_dict())
    assert "a.safetensors is listed more than once; only the first entry is used" in caplog.text
    assert f"dit already has weights from {a}; ignored {b}" in caplog.text


def test_missing_and_unexpected_keys_are_errors_unless_allowed(tmp_path: Path) -> None:
    state = made(1).dit.state_dict()
    del state["head.bias"]
    state |= {f"extra.{number}": torch.zeros(1) for number in range(8)}
    save_file(state, tmp_path / "a.safetensors")
    path = str(tmp_path / "a.safetensors")
    module = made(2)
    before = state_of(module)
    for fields in ({}, {"allow_missing": True}, {"allow_unexpected": True}):
        with pytest.raises(ConfigError) as raised:
            load(module, paths=(path,), **fields)
        said = str(raised.value)
        assert "nearest is dit" in said
        assert ("missing: dit.head.bias" in said) == ("allow_missing" not in fields)
        assert ("extra.4, … (8 in total)" in said) == ("allow_unexpected" not in fields)
    assert not differing(module.state_dict(), before)
    load(module, paths=(path,), allow_missing=True, allow_unexpected=True)
    assert differing(module.dit.state_dict(), made(1).dit.state_dict()) == {"head.bias"}


def test_shards_listed_as_models_are_refused_with_the_remedy(tmp_path: Path) -> None:
    paths = shards(made(1).dit.state_dict(), tmp_path, 2)
    with pytest.raises(ConfigError, match="if this file is one of several shards, put them into one list"):
        load(made(2), paths=tuple(paths))
    with pytest.raises(ConfigError, match="both contain the key"):
        load(made(2), paths=((paths[0], paths[1], str(shards(made(1).dit.state_dict(), tmp_path / "b", 1)[0])),))


def test_a_model_of_another_size_is_refused_with_its_shapes(tmp_path: Path) -> None:
    save_file(made(1, dim=24).dit.state_dict(), tmp_path / "a.safetensors")
    for may_lack in ((), ("autoencoder",)):
        module = made(2, task="sft:train" if may_lack else "sft")
        with pytest.raises(
            ConfigError, match=r"different shapes: .*dit.blocks.0.attention.k.bias 16 here and 24 in the file"
        ):
            load(module, may_lack, paths=(str(tmp_path / "a.safetensors"),))
    with pytest.raises(ConfigError, match="does not fit refiner: it has"):
        load(made(2), paths={"refiner": str(tmp_path / "a.safetensors")})


def test_a_file_that_fits_two_models_needs_a_name_or_its_models_prefix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, module = modules.Pair(), modules.Pair()
    save_file(source.teacher.state_dict(), tmp_path / "a.safetensors")
    path = str(tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"fits several children \(student, teacher\); choose one"):
        load(module, paths=(path,))
    load(module, paths={"teacher": path})
    assert not differing(module.teacher.state_dict(), source.teacher.state_dict())
    assert differing(module.student.state_dict(), source.teacher.state_dict())
    load(module, paths={"student": path, "teacher": path})
    assert not differing(module.student.state_dict(), source.teacher.state_dict())
    save_file({f"teacher.{n}": t for n, t in source.student.state_dict().items()}, tmp_path / "b.safetensors")
    assert set(load(module, paths=(str(tmp_path / "b.safetensors"),)).values()) == {"teacher"}
    with pytest.raises(ConfigError, match="to 'tutor', which the training module lacks; allowed: student, teach"):
        load(module, paths={"tutor": path})


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_shared_weight_is_stored_once_and_stays_shared(tmp_path: Path, on_meta: bool) -> None:
    torch.manual_seed(0)
    source = modules.Pair()
    save_file({"embed.weight": source.tied.embed.weight.detach()}, tmp_path / "a.safetensors")
    module = modules.Pair()
    if on_meta:
        empty = nn.Parameter(torch.empty(7, 5, device="meta"))
        module.tied.embed.weight = module.tied.head.weight = empty
    load(module, paths={"tied": str(tmp_path / "a.safetensors")})
    assert module.tied.head.weight is module.tied.embed.weight
    # Loaded weights are copies, so the file may change during the run.
    with (tmp_path / "a.safetensors").open("r+b") as file:
        file.seek(-7 * 5 * 4, os.SEEK_END)
        file.write(bytes(7 * 5 * 4))
    assert torch.equal(module.tied.head.weight, source.tied.embed.weight)


def test_files_of_unused_encoders_are_skipped(tmp_path: Path) -> None:
    """Row 37: the files must exist, but they are not loaded."""
    source, module = made(1), made(2, task="sft:train")
    save_file(source.autoencoder.state_dict(), tmp_path / "vae.safetensors")
    save_file(source.dit.state_dict(), tmp_path / "dit.safetensors")
    dit, vae = str(tmp_path / "dit.safetensors"), str(tmp_path / "vae.safetensors")
    assert load(module, ("autoencoder",), paths=(dit, vae)) == {dit: "dit"}
    assert load(module, ("autoencoder",), paths={"dit": dit, "autoencoder": vae}) == {dit: "dit"}
    assert not differing(module.dit.state_dict(), source.dit.state_dict())
    with pytest.raises(ConfigError, match="fits no child"):
        load(module, (), paths=(dit, vae))
    with pytest.raises(ConfigError, match="to 'autoencoder', which the training module lacks"):
        load(module, (), paths={"autoencoder": vae})


class Hostile:
    """A pickle that calls a function while it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def test_a_hostile_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "it-ran"
    torch.save({"weight": torch.zeros(1), "x": Hostile(proof)}, tmp_path / "new.pth")
    torch.save({"x": Hostile(proof)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.bin").write_bytes(pickle.dumps({"x": Hostile(proof)}))
    for name in ("new.pth", "old.pt", "plain.bin"):
        with pytest.raises(ConfigError, match=f"{name} is damaged, or is a pickle that contains objects other than"):
            load(made(0), paths=(str(tmp_path / name),))
    assert not proof.exists()


def test_files_without_a_state_dict_are_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    torch.save({"weight": torch.zeros(1), "step": 3}, tmp_path / "mixed.pth")
    (tmp_path / "noise.pth").write_bytes(bytes(range(256)) * 4)
    for name, said in {
        "list": "is a pickle that contains an object of type list.*; convert its tensors to safetensors",
        "mixed": "is a pickle whose entry 'step' does not map a name to a tensor.*; convert its tensors to safetensors",
        "noise": "noise.pth",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load(made(0), paths=(str(tmp_path / f"{name}.pth"),))


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_pickle_named_safetensors_is_reported_as_a_pickle(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "lora.safetensors"
    torch.save({"weight": torch.zeros(1)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ConfigError, match=r"lora\.safetensors is a pickle.*; convert its tensors to safetensors"):
        load(made(0), paths=(str(path),))


def test_fingerprints_depend_on_the_bytes_and_not_on_the_folder(tmp_path: Path) -> None:
    rows = []
    for place in ("one", "two"):
        paths = shards(made(1).dit.state_dict(), tmp_path / place, 2)
        rows.append(fingerprints(map(Path, paths)))
    assert rows[0] == rows[1]
    content = Path(paths[0]).read_bytes()
    facts = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert rows[0][0] == {"name": "model-00001-of-00002.safetensors", **facts}


@given(trainable=st.sets(st.sampled_from(["dit", "dit.blocks.1", "dit.head", "refiner", "autoencoder"]), min_size=1))
@settings(max_examples=15)
def test_trained_parameters_are_saved_and_load_again(trainable: set[str]) -> None:
    module, other = made(1), made(2)
    module.requires_grad_(False)
    for name in trainable:
        module.get_submodule(name).requires_grad_(True)
    files = saving.files(module, saving.changing(module))
    saved = {name: tensor for file in files for name, tensor in file.tensors.items()}
    assert {n for n, _ in module.named_parameters() if n in saved} == {
        n for n, p in module.named_parameters() if p.requires_grad
    }
    children = {name.partition(".")[0] for name in saved}
    assert {file.name for file in files} == ({""} if len(children) == 1 else children)
    other.load_state_dict(saved, strict=False)
    assert not differing(saved, other.state_dict())


def test_a_saved_model_with_buffers_is_a_complete_weight_file(tmp_path: Path) -> None:
    """The statistics of a norm are saved too; without them, the file would lack keys."""
    module, again = made(1), made(2)
    module.requires_grad_(False)
    module.autoencoder.requires_grad_(True)
    module.autoencoder.train()(modules.clip()["video"])
    (file,) = saving.files(module, saving.changing(module))
    save_file(file.tensors, tmp_path / "a.safetensors", metadata=file.metadata)
    load(again, paths=(str(tmp_path / "a.safetensors"),))
    assert not differing(again.autoencoder.state_dict(), module.autoencoder.state_dict())


def test_adapters_have_a_separate_file_with_rank_and_alpha(tmp_path: Path) -> None:
    module = made(1)
    module.requires_grad_(False)
    module.refiner.requires_grad_(True)
    lora.inject(module, LoraConfig(base_model="dit", target_modules="q,v", rank=2, alpha=6))
    files = {file.name: file for file in saving.files(module, saving.changing(module))}
    assert files.keys() == {"", "lora"}
    assert files[""].tensors.keys() == {f"refiner.{name}" for name in module.refiner.state_dict()}
    assert {name for name in files["lora"].tensors if "blocks.0" in name} == {
        f"transformer.blocks.0.attention.{layer}.lora_{half}.weight" for layer in "qv" for half in "AB"
    }
    said = files["lora"].metadata
    assert (said["rank"], said["alpha"], said["base_model"]) == ("2", "6", "dit")
    assert len(json.loads(said["target_modules"])) == 4
    assert not any(".default." in name or "base_layer" in name for file in files.values() for name in file.tensors)
    module.refiner.requires_grad_(False)
    assert [file.name for file in saving.files(module, saving.changing(module))] == [""]


def test_gathered_tensors_take_the_place_of_the_modules(tmp_path: Path) -> None:
    module = made(1)
    doubled = {name: 2 * parameter.detach() for name, parameter in module.named_parameters()}
    for file in saving.files(module, doubled):
        for name, tensor in file.tensors.items():
            assert torch.equal(tensor, doubled.get(name, module.state_dict()[name]))


def test_a_prefix_is_removed_only_at_the_start_and_never_merges_names() -> None:
    state = {"pipe.dit.a": torch.zeros(1), "refiner.pipe.dit.b": torch.ones(1)}
    assert saving.remove_prefix(state, "pipe.dit.").keys() == {"a", "refiner.pipe.dit.b"}
    assert saving.remove_prefix(state, "").keys() == state.keys()
    with pytest.raises(
        ConfigError, match=r"without this prefix, pipe\.dit\.a would have the same name as another tensor"
    ):
        saving.remove_prefix({**state, "a": torch.zeros(1)}, "pipe.dit.")


class Hub(http.server.BaseHTTPRequestHandler):
    """The parts of a model hub that a download needs: a repository's list of files, and the files."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2].partition("?")[0]
        if self.path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in self.files.items()]
            tree = [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in self.files.items()]
            info = {"id": "org/model", "sha": self.commit, "siblings": siblings}
            self.answer(json.dumps(tree if "/tree/" in self.path else info).encode(), "application/json")
        elif self.path.startswith("/org/model/resolve/") and name in self.files:
            self.answer(self.files[name], "application/octet-stream")
        else:
            self.answer(b"{}", "application/json", 404)

    def answer(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    shards(made(1).dit.state_dict(), tmp_path / "hub", 2)
    files = {path.name: path.read_bytes() for path in (tmp_path / "hub").iterdir()}
    handler = type("OneHub", (Hub,), {"files": {**files, "README.md": b"not asked for"}})
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        yield url


RESOLVE = """
import os, sys
from pathlib import Path
from streamvid.errors import ConfigError
from streamvid.modules.config import WeightsConfig
from streamvid.modules.weight_files import resolve as resolve_files

def resolve(name, download, **environment):
    os.environ.update(environment)
    config = WeightsConfig(id_with_origin_paths=name + ":*.safetensors", root=Path(sys.argv[1]), download=download)
    try:
        print(*(file.name for source in resolve_files(config) for file in source.files))
    except ConfigError as error:
        print("refused:", error)
    for key in environment:
        del os.environ[key]

resolve("org/model", False)
resolve("org/model", True, DIFFSYNTH_SKIP_DOWNLOAD="True")
resolve("org/model", True, HF_HUB_OFFLINE="1")
resolve("org/model", True)
resolve("org/model", False)
resolve("org/gone", True)
"""


def test_a_hub_is_used_only_if_downloads_are_enabled(tmp_path: Path, hub: str) -> None:
    """Row 15: matching files are downloaded below the root, and later found there without the hub."""
    # Run in a separate process, because the hub's library reads its address only once.
    own = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = run_python(RESOLVE, tmp_path, env={**os.environ, **own})
    said = done.stdout.splitlines()
    for line in said[:3]:
        assert line.startswith("refused: weight files: 'org/model:*.safetensors' matches no file below")
    assert said[3:5] == ["model-00001-of-00002.safetensors model-00002-of-00002.safetensors"] * 2
    assert said[5].startswith("refused: weight files: cannot download org/gone")
    assert not (tmp_path / "org" / "model" / "README.md").exists()


def test_a_trained_file_is_restored_from_safetensors(tmp_path: Path) -> None:
    module = made(1)
    module.autoencoder.requires_grad_(False)
    for file in saving.files(module, saving.changing(module)):
        save_file(file.tensors, tmp_path / f"{file.name}.safetensors", metadata=file.metadata)
    again = made(2)
    load(again, paths=tuple(str(path) for path in sorted(tmp_path.iterdir())))
    read = {name: tensor for path in tmp_path.iterdir() for name, tensor in load_file(path).items()}
    assert not differing(read, again.state_dict())
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {name for name, _ in again.named_parameters() if name in read} == trained
