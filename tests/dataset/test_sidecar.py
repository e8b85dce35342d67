"""Tests of features on disk: tensors round-trip, bytes do not depend on the writer, and invalid data is detected."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.dataset.features.sidecar import open_sidecar
from streamvid.dataset.features.tables import MemberTable, SidecarShard, SidecarShards
from streamvid.dataset.features.tensors import DTYPES, RawTensor, decode_tensors, encode_tensors
from streamvid.dataset.features.writer import SidecarWriter
from streamvid.dataset.manifest import FileInfo, ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, DatasetError, IntegrityError, StorageError
from tests.dataset.samples import edit_manifest, seal
from tests.files import read_webdataset

TORCH = {
    "I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "I16": torch.int16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
MADE_WITH = {"factory": "a:b", "view": {"temporal": "head", "seed": 0}}
NUM_VISITS = 2


def tensors_of(key: str, visit: int) -> dict[str, RawTensor]:
    """Return the tensors of a sample's visit, which are the same in every process."""
    data = hashlib.sha256(f"{key} {visit}".encode()).digest()
    length = 1 + data[0] % 4
    return {
        "latents": RawTensor("BF16", (2, 4), data[:16]),
        "tokens": RawTensor("F32", (length, 2), (data * 4)[: 8 * length], is_ragged=True),
    }


NULL = {"tokens": RawTensor("F32", (1, 2), bytes(8))}


def samples_of(dataset: Dataset, shard: ShardInfo) -> Iterator[tuple[str, list[dict[str, RawTensor]]]]:
    for key in dataset.samples(shard, ["key"]).column("key").to_pylist():
        yield key, [tensors_of(f"{shard.path} {key}", visit) for visit in range(NUM_VISITS)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("base")
    seal(root, (2, 3, 4, 1))
    return open_dataset(root)


def written(root: Path, dataset: Dataset, shards: list[ShardInfo] | None = None) -> Path:
    writer = SidecarWriter(root, dataset, MADE_WITH, NUM_VISITS)
    for shard in list(dataset.shards) if shards is None else shards:
        writer.write_shard(shard, samples_of(dataset, shard))
    writer.seal(NULL)
    return root


@pytest.fixture(scope="module")
def sidecar_root(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("sidecar") / "sidecar", dataset)


def digests(root: Path) -> dict[str, str]:
    """Return the checksums of all files below a folder."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# Tensors.


@st.composite
def raw_tensors(draw: st.DrawFn) -> RawTensor:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    if shape:
        shape = (draw(st.integers(0, 5)), *shape[1:])
    num_bytes = DTYPES[dtype]
    for size in shape:
        num_bytes *= size
    values = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    return RawTensor(dtype, shape, bytes(v & 1 for v in values) if dtype == "BOOL" else values)


@given(
    st.dictionaries(st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,9}", fullmatch=True), raw_tensors(), min_size=1, max_size=6)
)
def test_tensors_round_trip_and_match_safetensors(tensors: dict[str, RawTensor]) -> None:
    """Every type and shape is encoded byte for byte as by the library, in whatever order the tensors are passed."""
    data = encode_tensors(tensors)
    assert encode_tensors(dict(reversed(tensors.items()))) == data
    assert decode_tensors(data, "here") == {name: replace(one, data=one.data) for name, one in tensors.items()}
    theirs = safetensors.torch.load(data)
    for name, one in tensors.items():
        assert theirs[name].dtype == TORCH[one.dtype] and tuple(theirs[name].shape) == one.shape
        assert theirs[name].reshape(-1).view(torch.uint8).numpy().tobytes() == one.data
    assert safetensors.torch.save(theirs) == data


def file_of(header: object, body: bytes = bytes(8), num_bytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if num_bytes is None else num_bytes).to_bytes(8, "little") + text + body


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


HOSTILE = {
    "empty": b"",
    "a header longer than the file": file_of(entry(), num_bytes=1 << 40),
    "a huge header": file_of(b'{"x":' + b" " * (2 << 20) + b"1}"),
    "not JSON": file_of(b"{" * 64),
    "a deep header": file_of(b"[" * 100_000),
    "a list": file_of([1]),
    "no tensor": file_of({}, b""),
    "another type": file_of(entry(dtype="F128")),
    "a type that is not text": file_of(entry(dtype=["F32"])),
    "sizes that overflow": file_of(entry(shape=[1 << 32, 1 << 32])),
    "a size beyond 64 bits": file_of(entry(shape=[1 << 400])),
    "a size below 0": file_of(entry(shape=[-2])),
    "two sizes below 0": file_of(entry(shape=[-1, -2])),
    "a Boolean": file_of(entry(shape=[True, 2])),
    "a text": file_of(entry(shape="2")),
    "many dimensions": file_of(entry(shape=[1] * 60 + [2])),
    "no bytes and a huge size": file_of(entry(shape=[1 << 40, 0], data_offsets=[0, 0]), b""),
    "bytes past the end": file_of(entry(data_offsets=[8, 16])),
    "bytes before the start": file_of(entry(data_offsets=[-8, 0])),
    "fewer bytes than sizes": file_of(entry(data_offsets=[0, 4]), bytes(4)),
    "unclaimed bytes": file_of(entry(), bytes(16)),
    "a path for a name": file_of({"../x": entry()["x"]}),
    "an empty name": file_of({"": entry()["x"]}),
    "overlapping tensors": file_of({"x": entry()["x"], "y": entry()["x"]}),
    "three ends": file_of(entry(data_offsets=[0, 8, 8])),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_an_invalid_file_is_refused(data: bytes) -> None:
    """SAFE-1: the IntegrityError names the file, and no memory is allocated for claimed sizes."""
    with pytest.raises(IntegrityError, match="in the test is not a readable safetensors file"):
        decode_tensors(data, "in the test")


@given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_changed_bytes_are_an_error_or_other_values(place: int, new: bytes) -> None:
    """SAFE-1: any bytes decode to tensors that fit in them, or raise an IntegrityError."""
    data = encode_tensors(tensors_of("a", 0))
    changed = data[: place % len(data)] + new + data[place % len(data) + len(new) :]
    try:
        found = decode_tensors(changed, "here")
    except IntegrityError:
        return
    assert sum(one.num_bytes for one in found.values()) < len(changed)


@pytest.mark.parametrize(
    ("tensors", "wrong"),
    [
        ({}, "0 tensors"),
        ({"a b": RawTensor("U8", (1,), b"1")}, "tensor 'a b'"),
        ({"9a": RawTensor("U8", (1,), b"1")}, "tensor '9a'"),
    ],
)
def test_unsupported_tensors_are_refused(tensors: dict[str, RawTensor], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        encode_tensors(tensors)
    for values in (("F31", (1,), b"1"), ("F32", (2,), b"1234"), ("F32", (3, 0), b""), ("U8", (1.0,), b"1")):
        with pytest.raises(ConfigError):
            RawTensor(*values)  # type: ignore[arg-type]


# Writing.


def test_bytes_depend_on_the_contents_and_not_on_the_writer(
    dataset: Dataset, sidecar_root: Path, tmp_path: Path
) -> None:
    """SHARD-2: two writers at once, in another order and with one shard written twice, produce the same files and no
    others."""
    shards = list(dataset.shards)
    one, other = (SidecarWriter(tmp_path / "s", dataset, MADE_WITH, NUM_VISITS) for _ in range(2))
    for number, shard in enumerate(reversed(shards)):
        (one, other)[number % 2].write_shard(shard, samples_of(dataset, shard))
    one.write_shard(shards[0], samples_of(dataset, shards[0]))
    sealed = other.seal(NULL)
    assert digests(tmp_path / "s") == digests(sidecar_root)
    again = SidecarWriter(tmp_path / "s", dataset, MADE_WITH, NUM_VISITS)
    assert again.sealed == sealed and all(map(again.is_done, shards)) and again.seal(NULL) == sealed
    with pytest.raises(DatasetError, match="are sealed"):
        again.write_shard(shards[0], samples_of(dataset, shards[0]))


def test_every_tensor_is_at_its_indexed_offset(dataset: Dataset, sidecar_root: Path) -> None:
    sidecar = open_sidecar(sidecar_root)
    sidecar.check_base(dataset)
    assert sidecar.manifest.num_visits == NUM_VISITS and sidecar.manifest.made_with == MADE_WITH
    assert {n: (r.dtype, r.shape, bytes(r.data)) for n, r in sidecar.null.items()} == {
        n: (r.dtype, r.shape, bytes(r.data)) for n, r in NULL.items()
    }
    for shard in dataset.shards:
        members, tar = sidecar.members(shard), (sidecar_root / sidecar.shard(shard).path).read_bytes()
        for row, (_, visits) in enumerate(samples_of(dataset, shard)):
            for visit in range(2 * NUM_VISITS):
                offset, num_bytes, sha256 = members.place(row, visit) or (0, 0, b"")
                data = tar[offset : offset + num_bytes]
                assert hashlib.sha256(data).digest() == sha256
                wanted = {name: replace(one, is_ragged=False) for name, one in visits[visit % NUM_VISITS].items()}
                assert sidecar.tensors(data, "here") == wanted


def test_webdataset_reads_the_tars(dataset: Dataset, sidecar_root: Path) -> None:
    """There is one sample per key and one member per visit, and the safetensors library reads the members."""
    for shard in dataset.shards:
        read = read_webdataset(sidecar_root / shard.path)
        assert [one["__key__"] for one in read] == [key for key, _ in samples_of(dataset, shard)]
        for one, (_, visits) in zip(read, samples_of(dataset, shard), strict=True):
            for visit in range(NUM_VISITS):
                theirs = safetensors.torch.load(one[f"v{visit}.safetensors"])
                assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == {
                    name: raw.shape for name, raw in visits[visit].items()
                }


def test_failed_visits_have_no_member(dataset: Dataset, tmp_path: Path) -> None:
    """BAD-1: a visit, a sample or a whole shard can be missing; missing visits are counted in the manifest."""
    writer = SidecarWriter(tmp_path / "s", dataset, MADE_WITH, NUM_VISITS)
    shards = list(dataset.shards)
    for shard in shards:
        samples: list[Any] = list(samples_of(dataset, shard))
        if shard is shards[1]:
            samples[0] = (samples[0][0], [None, samples[0][1][1]])
            samples[2] = (samples[2][0], [None, None])
        if shard is shards[3]:
            samples = [(key, [None] * NUM_VISITS) for key, _ in samples]
        writer.write_shard(shard, samples)
    assert writer.seal().num_missing == 3 + NUM_VISITS * shards[3].num_samples
    sidecar = open_sidecar(tmp_path / "s")
    sidecar.check_base(dataset)
    members = sidecar.members(shards[1])
    there = [[members.place(row, visit) is not None for visit in range(2)] for row in range(3)]
    assert there == [[False, True], [True, True], [False, False]] and sidecar.null == {}
    assert sidecar.members(shards[3]).place(0, 0) is None


WRITE = """
import sys, time
from streamvid.dataset.versions.open import open_dataset
from streamvid.dataset.features.writer import SidecarWriter
from tests.dataset import test_sidecar as t
dataset = open_dataset(sys.argv[1])
writer = SidecarWriter(sys.argv[2], dataset, t.MADE_WITH, t.NUM_VISITS)
def slow(samples):
    for one in samples:
        print("sample", flush=True)
        sys.stdin.readline()
        yield one
for shard in dataset.shards:
    if not writer.is_done(shard):
        writer.write_shard(shard, slow(t.samples_of(dataset, shard)))
        print("shard", flush=True)
        sys.stdin.readline()
writer.seal(t.NULL)
print("sealed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_killed_writer_resumes(dataset: Dataset, sidecar_root: Path, tmp_path: Path, seed: int) -> None:
    """SHARD-1: after two kills with -9 at seeded moments, no finished shard is written again, and the bytes are the
    same."""
    root, moments = tmp_path / "s", random.Random(seed)
    kept: dict[Path, int] = {}
    for steps in [moments.randrange(1, 8), moments.randrange(1, 8), 1000]:
        command = [sys.executable, "-c", WRITE, dataset.url, str(root)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            for _ in range(steps):
                if (line := process.stdout.readline()) == "sealed\n":
                    break
                assert line
                process.stdin.write("\n")
                process.stdin.flush()
            else:
                assert process.stdout.readline()  # so that the kill does not come at the start
            process.send_signal(signal.SIGKILL)
        finished = [path.name.removesuffix(".json") for path in root.glob(".staging/*-[0-9]*.json")]
        tars = {path: path.stat().st_mtime_ns for path in root.glob("shards/*/*.tar") if path.stem in finished}
        assert kept.items() <= ({path: path.stat().st_mtime_ns for path in root.glob("shards/*/*.tar")}).items()
        kept |= tars
    assert digests(root) == digests(sidecar_root) and not (root / ".staging").exists()


def test_other_features_are_refused_with_the_differences(dataset: Dataset, sidecar_root: Path, tmp_path: Path) -> None:
    """For unfinished and for sealed features, each difference is named with both values."""
    begun = tmp_path / "begun"
    SidecarWriter(begun, dataset, MADE_WITH, NUM_VISITS)
    seal(tmp_path / "other", (2, 2))
    other = open_dataset(tmp_path / "other")
    for root, state in ((begun, "unfinished"), (sidecar_root, "sealed")):
        before = digests(root)
        with pytest.raises(
            ConfigError,
            match=rf"different {state} features .*made_with.view.temporal is \"head\" in the features, but \"random\"",
        ):
            SidecarWriter(root, dataset, {**MADE_WITH, "view": {"temporal": "random", "seed": 0}}, NUM_VISITS)
        with pytest.raises(
            ConfigError,
            match="made_with.dtype is not set in the features, but .*; num_visits is 2 in the features, but 1 here",
        ):
            SidecarWriter(root, dataset, {**MADE_WITH, "dtype": "BF16"}, 1)
        with pytest.raises(ConfigError, match="base.content is .* in the features, but .* here; base.plan is"):
            SidecarWriter(root, other, MADE_WITH, NUM_VISITS)
        assert digests(root) == before
    with pytest.raises(DatasetError, match="contains files that are not features"):
        SidecarWriter(dataset.url + "/shards", dataset, MADE_WITH)
    for wrong in ({"a": object()}, {"a": float("nan")}):
        with pytest.raises(ConfigError, match="cannot be encoded as JSON"):
            SidecarWriter(tmp_path / "none", dataset, wrong)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="num_visits=0"):
        SidecarWriter(tmp_path / "none", dataset, {}, 0)


def test_tensors_that_do_not_match_a_shard_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    writer, shard = SidecarWriter(tmp_path / "s", dataset, MADE_WITH, NUM_VISITS), dataset.shards[1]
    samples = list(samples_of(dataset, shard))
    x = {"x": RawTensor("U8", (1,), b"1")}
    wrong: list[tuple[list[Any], type[Exception], str]] = [
        (samples[:2], DatasetError, "has 3 samples, but tensors for 2 samples were passed"),
        ([*samples, samples[0]], DatasetError, "has 3 samples, but tensors for more samples were passed"),
        ([samples[1], samples[0], samples[2]], DatasetError, "has the key .*'a-0'.*, not 'a-1'"),
        ([(samples[0][0], samples[0][1][:1])], ConfigError, "tensors for 1 visits, but num_visits=2"),
        ([(samples[0][0], [x, {"x": RawTensor("U8", (2,), b"12")}])], ConfigError, "sample a-0 has the tensors x U8"),
        ([(samples[0][0], [x, {"x": RawTensor("I8", (1,), b"1")}])], ConfigError, "x I8"),
        ([(samples[0][0], [x, {"y": x["x"]}])], ConfigError, "y U8"),
        (
            [(samples[0][0], [{"x": RawTensor("U8", (1,), b"1", True), "x_mask": x["x"]}] * 2)],
            ConfigError,
            "'x_mask': this name is reserved for the mask of ragged tensor 'x'",
        ),
    ]
    for given_samples, error, match in wrong:
        with pytest.raises(error, match=match):
            writer.write_shard(shard, given_samples)
    assert not list((tmp_path / "s").rglob("*.tar*")) and not writer.is_done(shard)
    with pytest.raises(DatasetError, match=r"4 of 4 shards are not finished .for example, shards/96x64-9f"):
        writer.seal()
    for one in dataset.shards:
        if one is not dataset.shards[3]:
            writer.write_shard(one, samples_of(dataset, one))
    last = dataset.shards[3]
    writer.write_shard(last, [(key, [x] * NUM_VISITS) for key, _ in samples_of(dataset, last)])
    with pytest.raises(DatasetError, match="has the tensors x U8 .*, but other shards have latents BF16"):
        writer.seal()
    writer.write_shard(last, samples_of(dataset, last))
    for name, null in (
        ("latent", NULL["tokens"]),
        ("tokens", RawTensor("F32", (1, 3), bytes(12))),
        ("latents", x["x"]),
    ):
        with pytest.raises(ConfigError, match="does not match the samples"):
            writer.seal({name: null})
    assert writer.seal(NULL).null_file is not None


# Invalid features.


@pytest.fixture
def copy(dataset: Dataset, sidecar_root: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(sidecar_root, tmp_path / "copy"))


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(format="other"),
        lambda v: v.update(format_version=[2, 0]),
        lambda v: v.update(num_visits=0),
        lambda v: v.update(num_visits=1 << 40),
        lambda v: v.update(num_visits="2"),
        lambda v: v["tensors"].update({"../x": {"dtype": "F32", "is_ragged": False}}),
        lambda v: v["tensors"]["latents"].update(dtype="F31"),
        lambda v: v["shards"].update(path="../../etc/passwd"),
        lambda v: v["shards"].update(path="/etc/passwd"),
        lambda v: v["shards"].update(num_bytes=-1),
        lambda v: v["null"].update(path="index/../../x"),
        lambda v: v.pop("base"),
        lambda v: v.update(made_with=[1]),
    ],
)
def test_an_invalid_manifest_is_refused(copy: Path, change: Any) -> None:
    """SAFE-1."""
    edit_manifest(copy, change)
    with pytest.raises(DatasetError):
        open_sidecar(copy)


def test_a_changed_byte_is_found_wherever_it_is(dataset: Dataset, copy: Path) -> None:
    """FETCH-1: changed or truncated manifests, tables and null tensors are errors."""

    def read() -> None:
        sidecar = open_sidecar(copy)
        sidecar.check_base(dataset)
        assert sidecar.null
        for shard in dataset.shards:
            sidecar.members(shard)

    read()
    for path in sorted(path for path in copy.rglob("*") if path.is_file() and path.suffix != ".tar"):
        data = path.read_bytes()
        for changed in (data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], data[:-9], b""):
            path.write_bytes(changed)
            with pytest.raises((IntegrityError, DatasetError, StorageError), match=str(copy)):
                read()
        path.write_bytes(data)
    read()
    claimed = 1 << 50
    edit_manifest(copy, lambda value: value["null"].update(num_bytes=claimed))
    with pytest.raises(IntegrityError, match=f"is {claimed} bytes long; .* are allowed"):
        read()
    edit_manifest(copy, lambda value: value["shards"].update(num_bytes=claimed))
    with pytest.raises(IntegrityError, match="is missing|bytes instead of"):
        open_sidecar(copy).check_base(dataset)


def shards_table(rows: int, **columns: Any) -> bytes:
    values: dict[str, Any] = {
        "bucket_id": ["a"] * rows, "number": pa.array(range(rows), pa.int32()),
        "num_bytes": [9] * rows, "max_member_bytes": [9] * rows, "index_num_bytes": [9] * rows, "num_missing": [0] * rows,
        **{name: pa.array([bytes(32)] * rows, pa.binary(32)) for name in ("base_sha256", "sha256", "index_sha256")},
    } | columns  # fmt: skip
    sink = pa.BufferOutputStream()
    table = pa.table({name: value for name, value in values.items() if value is not None})
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    "data",
    [
        b"PAR1",
        shards_table(2, number=None),
        shards_table(2, number=["0", "1"]),
        shards_table(2, bucket_id=[None, "a"]),
        shards_table(2, bucket_id=[1, 2]),
        shards_table(2, num_bytes=[None, 1]),
        shards_table(2, sha256=["a", "b"]),
        shards_table(1_000_000),  # run-length encoding makes it small
        shards_table(1, bucket_id=[" " * (80 << 20)]),
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_an_invalid_shard_table_is_refused(data: bytes) -> None:
    """SAFE-1: this includes a table that claims more rows than its bytes can hold checksums for."""
    with pytest.raises(IntegrityError, match="in the test cannot be read"):
        SidecarShards.read(data, "in the test")


def members_table(**columns: Any) -> bytes:
    values = {
        "key": ["a", "a", "b", "b"], "visit": pa.array([0, 1, 0, 1], pa.int32()), "offset": [512, 1536, 2560, None],
        "num_bytes": [10, 10, 10, None], "sha256": pa.array([bytes(32)] * 3 + [None], pa.binary(32)),
    } | columns  # fmt: skip
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: value for name, value in values.items() if value is not None}), sink)
    return bytes(sink.getvalue())


SHARD = SidecarShard("b", 0, 0, "0" * 64, 10240, "0" * 64, 100, 1000, "0" * 64)


@pytest.mark.parametrize(
    ("columns", "num_samples"),
    [
        ({}, 3),
        ({}, 1 << 30),
        ({"visit": pa.array([0, 0, 1, 1], pa.int32())}, 2),
        ({"visit": pa.array([0, 1, None, 1], pa.int32())}, 2),
        ({"offset": [512, 1536, 10239, None]}, 2),
        ({"offset": [512, 1536, 1 << 62, None]}, 2),
        ({"offset": [0, 1536, 2560, None]}, 2),
        ({"num_bytes": [10, 10, 101, None]}, 2),
        ({"num_bytes": [10, 10, 0, None]}, 2),
        ({"num_bytes": [10, 10, -(1 << 63), None]}, 2),
        ({"num_bytes": None}, 2),
        ({"offset": ["512", "1", "2", "3"]}, 2),
    ],
)
def test_an_invalid_member_table_is_refused(columns: dict[str, Any], num_samples: int) -> None:
    """SAFE-1: extra rows, other visits, offsets outside the tar, and sizes above the shard's maximum are refused."""
    good = MemberTable.read(members_table(), SHARD, 2, 2, "here")
    assert [good.place(1, visit) for visit in (0, 1, 2)] == [(2560, 10, bytes(32)), None, (2560, 10, bytes(32))]
    with pytest.raises(IntegrityError, match="in the test"):
        MemberTable.read(members_table(**columns), SHARD, num_samples, 2, "in the test")


def test_only_the_index_of_the_shard_is_read(dataset: Dataset, copy: Path) -> None:
    """PLAN-6: the indexes of other shards are not read and may be missing."""
    wanted = dataset.shards[2]
    for shard in dataset.shards:
        if shard is not wanted and shard.path != wanted.path:
            (copy / open_sidecar(copy).shard(shard).index_file.path).unlink()
    assert open_sidecar(copy).members(wanted).place(0, 0) is not None
    too_large = replace(SHARD, index_num_bytes=1 << 40)
    assert too_large.index_file == FileInfo("index/b-000000.parquet", 1 << 40, "0" * 64)


def test_features_of_another_dataset_are_refused(dataset: Dataset, sidecar_root: Path, tmp_path: Path) -> None:
    """The error names each fingerprint with both values, and a remedy."""
    seal(tmp_path / "other", (2, 2, 1))
    with pytest.raises(
        ConfigError, match=r"fingerprints.content is .* in the features, but .*fingerprints.plan is .*streamvid encode"
    ):
        open_sidecar(sidecar_root).check_base(open_dataset(tmp_path / "other"))
    with pytest.raises(DatasetError, match="no sealed features at .*streamvid encode"):
        open_sidecar(dataset.url + "/shards")
    with pytest.raises(DatasetError, match="format is 'streamvid', but must be 'streamvid-sidecar'"):
        open_sidecar(dataset.url)


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(0, 40), st.integers(0, 4))
def test_visits_repeat_the_stored_visits(num_visits: int, visit: int, row: int) -> None:
    import numpy as np

    count = 5 * num_visits
    offsets = np.arange(count) * 1024 + 512
    members = MemberTable(num_visits, offsets, np.full(count, 7), np.zeros((count, 32), np.uint8))
    assert members.place(row, visit) == (512 + 1024 * (row * num_visits + visit % num_visits), 7, bytes(32))
    assert members.place(row, visit - (1 << 62) * num_visits) == members.place(row, visit)
