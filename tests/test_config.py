from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.config import dump_config, exact, load_config
from streamvid.errors import ConfigError
from tests.processes import run_python


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"lr is {self.lr}; allowed: above 0")


@dataclass(frozen=True, kw_only=True)
class Run:
    path: Path
    name: str = "run"
    steps: int | None = None
    batch_size: int | dict[str, int] = 4
    precision: Literal["no", "bf16"] = "no"
    shuffle: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)
    second: Optimizer | None = None
    stages: tuple[Optimizer, ...] = ()


def load(*overrides: str) -> Run:
    return load_config(Run, None, ("path=/data", *overrides))


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def test_file_and_overrides_make_one_instance(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("path: /data\noptimizer: {lr: 1e-4, betas: [0.8, 0.9]}\nbatch_size: {832x480-81f: 2}\n")
    run = load_config(Run, file, ["optimizer.lr=3e-4", "second.lr=2", "stages=[{lr: 1}]", "steps=7", "steps=8"])
    assert run == Run(
        path=Path("/data"),
        steps=8,
        batch_size={"832x480-81f": 2},
        optimizer=Optimizer(lr=3e-4, betas=(0.8, 0.9)),
        second=Optimizer(lr=2.0),
        stages=(Optimizer(lr=1.0),),
    )


def test_empty_file_is_all_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# nothing\n")
    assert load_config(Optimizer, file) == Optimizer()


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("optimizer.lr=1e-4", "optimizer", Optimizer(lr=1e-4)),
        ("optimizer.lr=1E3", "optimizer", Optimizer(lr=1000.0)),
        ("optimizer.lr=.5", "optimizer", Optimizer(lr=0.5)),
        ("precision=no", "precision", "no"),
        ("name=16:9", "name", "16:9"),
        ("name=2024-01-01", "name", "2024-01-01"),
        ("name='12'", "name", "12"),
        ("name=a=b", "name", "a=b"),
        ("steps=null", "steps", None),
        ("steps=010", "steps", 10),
        ("shuffle=true", "shuffle", True),
    ],
)
def test_scalars_have_the_type_that_they_look_like(override: str, name: str, value: object) -> None:
    assert getattr(load(override), name) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lt=1", "overrides: optimizer.lt is not a field; did you mean 'lr'?"),
        ("optimiser.lr=1", "overrides: optimiser is not a field; did you mean 'optimizer'?"),
        ("second.qqq=1", "overrides: second.qqq is not a field; allowed: lr, betas"),
        ("stages=[{}, {rl: 1}]", "overrides: stages.1.rl is not a field; did you mean 'lr'?"),
        ("optimizer.lr=fast", 'overrides: optimizer.lr is "fast"; allowed: a valid number'),
        ("optimizer.lr=true", "overrides: optimizer.lr is true; allowed: a valid number"),
        ("optimizer.lr=-1", "overrides: optimizer: lr is -1.0; allowed: above 0"),
        ("optimizer.lr=.nan", "overrides: optimizer: lr is nan; allowed: above 0"),
        ("optimizer.betas=[0.5]", "overrides: optimizer.betas is too short: it has no item with index 1; add items"),
        ("optimizer=3", "overrides: optimizer is 3; allowed: a section of fields"),
        ("steps=1.5", "overrides: steps is 1.5; allowed: a valid integer"),
        ("steps='3'", 'overrides: steps is "3"; allowed: a valid integer'),
        ("batch_size=x", 'overrides: batch_size is "x"; allowed: a valid integer or a section of fields'),
        ("batch_size={a: x}", 'overrides: batch_size.a is "x"; allowed: a valid integer'),
        ("precision=fp8", "overrides: precision is \"fp8\"; allowed: 'no' or 'bf16'"),
        ("shuffle=1", "overrides: shuffle is 1; allowed: a valid boolean"),
        (
            "name=12",
            "overrides: name is 12; allowed: a valid string; put it in quotes: '12' in a file, \"'12'\" in a shell",
        ),
        ("path=null", "overrides: path is null; allowed: "),
    ],
)
def test_a_mistake_is_named_with_its_field_value_and_remedy(override: str, message: str) -> None:
    assert error_of(override).startswith(message)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="path is missing and has no default; set it in the file or with path=VALUE"):
        load_config(Run, None)


def test_all_mistakes_are_reported_together() -> None:
    lines = error_of("nmae=x", "optimizer.lr=fast", "second.beta=1", "shuffle=no").splitlines()
    assert lines[0] == "4 mistakes in overrides:"
    assert sorted(line.split()[1] for line in lines[1:]) == ["nmae", "optimizer.lr", "second.beta", "shuffle"]


@pytest.mark.parametrize("override", ["steps", "=3", "optimizer.=3", ".lr=3", "name=[", "optimizer={lr: 1, lr: 2}"])
def test_a_malformed_override_is_quoted(override: str) -> None:
    assert override in error_of(override)


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("path: /data\nsteps: 3\n")
    with pytest.raises(ConfigError, match=r"override 'steps\.more=1': steps is 3, not a section of fields"):
        load_config(Run, file, ["steps.more=1"])


def test_an_override_changes_one_user_of_an_alias_only(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("path: /data\noptimizer: &o {lr: 1.0}\nsecond: *o\n")
    run = load_config(Run, file, ["second.lr=2"])
    assert (run.optimizer.lr, run.second and run.second.lr) == (1.0, 2.0)


@pytest.mark.parametrize(
    "content",
    [
        b"name: !!python/object/apply:os.system [true]",
        b"name: !!binary aGk=",
        b"name: \xff\xfe",
        b"name: [",
        b"- a list",
        b"just text",
        b"? [a, b]\n: 1",
        b"steps: " + b"9" * 5000,
        b"stages: &a [*a]",
        b"a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (n + 1, n + 1, b",".join([b"*%c" % n] * 10)) for n in range(97, 106)),
        b"name: " + b"x" * (1 << 20),
        b"[" * 100_000,
    ],
    ids=["python", "binary", "bytes", "torn", "list", "text", "key", "digits", "cycle", "bomb", "large", "deep"],
)
def test_a_hostile_file_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    """SAFE-1: a hostile file raises a short ConfigError that names the file."""
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(Run, file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(Run, tmp_path / "none.yaml")


@settings(deadline=None)
@given(
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(["no", "1e-4", "16:9", "~"]),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    batch_size=st.integers() | st.dictionaries(st.text("abc-0123456789", min_size=1), st.integers()),
    second=st.none() | st.just(Optimizer(lr=2.0)),
)
def test_dumped_configs_load_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    lr: float,
    batch_size: int | dict[str, int],
    second: Optimizer | None,
) -> None:
    run = Run(path=Path("a b"), name=name, batch_size=batch_size, optimizer=Optimizer(lr=lr), second=second)
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_text(dump_config(run), encoding="utf-8", newline="")
    assert load_config(Run, file) == run


def test_importing_config_costs_neither_pydantic_nor_yaml() -> None:
    run_python("import sys, streamvid.config; sys.exit(bool({'pydantic', 'yaml', 'torch'} & set(sys.modules)))")


@pytest.mark.parametrize("text", ["1e999999999", "1E5", "9" * 41, "1/0", "nan", ""])
def test_text_that_would_become_a_huge_number_is_refused(text: str) -> None:
    """SAFE-1: a few bytes of a manifest or YAML file cannot create a number with a billion digits."""
    with pytest.raises(ConfigError, match="fps=.*must be a finite number"):
        exact("fps", text)


def test_a_number_is_parsed_exactly() -> None:
    assert [exact("fps", value) for value in ("30000/1001", 0.33, "16:9", 24)] == [
        Fraction(30000, 1001), Fraction(33, 100), Fraction(16, 9), 24,
    ]  # fmt: skip
