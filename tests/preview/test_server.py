"""Tests of the preview over HTTP: pages, filters, steps, runs, refused requests, and damaged and remote datasets."""

from __future__ import annotations

import json
import re
import shutil
from itertools import islice
from pathlib import Path

import psutil
import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from tests.conftest import Sharded, run_streamvid
from tests.dataset.frozen import FROZEN
from tests.dataset.whole import seal_whole
from tests.files import tree_of
from tests.loader.conftest import open_loader
from tests.preview.conftest import PreviewServer, Serve
from tests.servers import S3Env, S3Server
from tests.shard_options import shard_options
from tests.sounding import chirps, sounding

BUCKET = "256px-17f-16x9"


def keys(text: str) -> list[str]:
    return re.findall(r'class="picture" href="[^"]+" aria-label="([^"]+)"', text)


def test_the_overview_agrees_with_stats(demo: PreviewServer, sharded: Sharded) -> None:
    before = tree_of(sharded.root)
    facts = json.loads(run_streamvid("stats", sharded.root, "--json").stdout)
    page = demo.get("/").text
    for bucket in facts["buckets"]:
        shape = bucket["shape"]
        row = page.split(f">{bucket['bucket']}</a></th>")[1].split("</tr>")[0]
        assert f'{shape[0]}</td><td class="n">{shape[1]} × {shape[2]}' in row and f">{bucket['samples']}</td>" in row
    for kind in facts["rejected_by_kind"]:
        assert f">{kind['kind']}</th>" in page and kind["examples"][0]["reason"] in page
    figures = demo.get("/figures").text
    found = json.loads(run_streamvid("stats", sharded.root, "--histograms", "--json").stdout)["histograms"]
    assert {one["name"] for one in found["figures"]} >= {
        "fps",
        "aspect",
        "crop_fraction",
        "caption_length",
        "user.aesthetic",
    }
    for one in found["figures"]:
        assert sum(one["counts"]) + one["num_missing"] == facts["samples"]
        assert f"<figcaption>{one['label']}</figcaption>" in figures
    assert tree_of(sharded.root) == before


def test_pages_filter_sort_and_continue(demo: PreviewServer, sharded: Sharded) -> None:
    rows = streamvid.open_dataset(sharded.root).samples_table().to_pylist()
    first = demo.get("/samples?sort=source_bytes&desc=1")
    more = re.search(r'data-rows="([^"]+)"', first.text)
    assert more is not None
    shown = keys(first.text) + keys(demo.get(more[1]).text)
    sizes = {row["key"]: row["source_bytes"] for row in rows}
    assert sorted(shown) == sorted(sizes) and [sizes[key] for key in shown] == sorted(sizes.values(), reverse=True)
    page = demo.get("/samples?where=fps+%3E+26+and+not+contains(text%2C+%22rabbit%22)&sort=fps").text
    wanted = [r for r in rows if (r["fps"] or 0) > 26 and r["text"] is not None and "rabbit" not in r["text"]]
    assert len(wanted) > 2 and sorted(keys(page)) == sorted(row["key"] for row in wanted)
    assert f'id="total">{len(wanted)}<' in page
    only = demo.get(f"/samples?bucket={BUCKET}&split=train&where=duration_seconds+%3C+3").text
    assert keys(only) == [r["key"] for r in rows if r["bucket_id"] == BUCKET and r["duration_seconds"] < 3]


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("/samples?where=fsp+%3E+2", "did you mean 'fps'"),
        ("/samples?where=__import__(%27os%27)", "where="),
        ("/samples?bucket=none", "bucket 'none' has no samples"),
        ("/samples?sort=clip_sha256", "sort 'clip_sha256': must be one of"),
        ("/samples?from=-1", "from='-1': must be an integer"),
        ("/step?ranks=60000&batch=4000", "ranks=60000 with batch=4000: a step has 240000000 samples"),
        ("/step?ranks=0", "ranks='0': must be an integer from 1"),
        ("/step?step=100000", "step=100000: epoch 0 has"),
        ("/step?shuffle=all", "shuffle='all': must be one of none, shards, window"),
    ],
)
def test_wrong_values_are_explained(demo: PreviewServer, query: str, problem: str) -> None:
    answer = demo.get(query)
    assert problem in answer.text and 'class="problem"' in answer.text


@pytest.mark.parametrize(
    "options", [{"tail": "carry"}, {"tail": "uneven"}, {"tail": "pad", "shuffle": "none", "where": "fps > 20"}]
)
def test_a_step_equals_that_of_the_loaders(demo: PreviewServer, sharded: Sharded, options: dict[str, str]) -> None:
    """PLAN-1: a step in a later epoch has the keys that the loaders of all ranks deliver."""
    query = "".join(f"&{name}={value.replace(' ', '+')}" for name, value in options.items())
    for step in (0, 2):
        page = demo.get(f"/step?epoch=1&step={step}&ranks=2&batch=2&seed=5{query}").text
        sections = page.split("<section ")[1:]
        assert len(sections) == 2
        for rank, section in enumerate(sections):
            world = streamvid.World(rank, 2)
            with open_loader(sharded.root, batch_size=2, world=world, seed=5, **options) as loader:
                loader.set_epoch(1, step)
                batch = next(iter(islice(loader, 1)))
                assert keys(section) == list(batch.sample_keys) and batch.bucket.id in section
                assert section.count(">repeat<") == int(batch.is_repeat.sum())


def test_a_view_is_applied_to_all_pages(serve: Serve, tmp_path: Path) -> None:
    root = tmp_path / "ds"
    shutil.copytree(FROZEN / "native", root)
    rows = streamvid.open_dataset(root).samples_table().to_pylist()
    (inside, *_) = (row for row in rows if row["index"] == 1)
    streamvid.view(root, "one", f"key == {inside['key']!r}")
    server = serve(f"{root}#one")
    for query in ("", "?where=fps+%3E+0", "?sort=fps"):
        page = server.get(f"/samples{query}").text
        assert keys(page) == [inside["key"]] and 'id="total">1<' in page, query
    assert not keys(server.get(f"/samples?where=key+!=+%22{inside['key']}%22+or+fps+%3C+0").text)
    leaving = server.get("/samples?where=fps+%3E+0)+or+(fps+%3E+0").text
    assert 'class="problem"' in leaving and not keys(leaving)
    assert ": 1</title>" in server.get("/figures").text and ": 2</title>" not in server.get("/figures").text
    assert "Only samples of the view" in server.get("/").text
    for path in ("/run", "/curves"):
        assert server.get(path).status == 404 and "--run DIR" in server.get(path).text
    found = server.get(f"/key/{inside['key']}")
    assert found.status == 302
    sample = server.get(found.headers["location"]).text
    assert "What the model gets" in sample and 'class="problem"' not in sample and 'rel="prev"' not in sample
    for row in rows:
        answer = server.get(f"/key/{row['key']}")
        assert row is inside or (answer.status == 404 and "is not in the view" in answer.text)
        for kind in ("sample", "poster", "clip"):
            answer = server.get(f"/{kind}/{row['bucket_id']}/{row['shard']}/{row['index']}")
            assert row is inside or (answer.status == 404 and "is not in the view (key ==" in answer.text)


def test_missing_samples_are_not_found(demo: PreviewServer) -> None:
    answer = demo.get("/key/none")
    assert answer.status == 404 and "key 'none' is not in" in answer.text
    assert demo.get(f"/sample/{BUCKET}/0/999").status == 404
    titles = re.findall(r"<title>(.* to .*)</title>", demo.get("/figures").text)
    assert titles and not [title for title in titles if "e-" in title], titles


def test_a_clip_is_served_in_ranges(demo: PreviewServer, sharded: Sharded) -> None:
    dataset = streamvid.open_dataset(sharded.root)
    row = dataset.samples(dataset.shards[0]).to_pylist()[0]
    stored = (sharded.root / dataset.shards[0].path).read_bytes()[row["clip_offset"] :][: row["clip_bytes"]]
    path = f"/clip/{row['bucket_id']}/{row['shard']}/0"
    whole = demo.get(path)
    assert whole.status == 200 and whole.body == stored and whole.headers["content-type"] == "video/mp4"
    part = demo.get(path, Range="bytes=100-199")
    assert part.status == 206 and part.body == stored[100:200]
    assert part.headers["content-range"] == f"bytes 100-199/{len(stored)}"
    assert demo.get(path, Range=f"bytes={len(stored) - 5}-").body == stored[-5:]
    assert demo.get(path, Range=f"bytes={len(stored)}-").status == 416


def test_audio_is_shown_if_a_clip_has_it(demo: PreviewServer, sharded: Sharded) -> None:
    rows = streamvid.open_dataset(sharded.root).samples_table().to_pylist()
    shown = {}
    for name in ("bigbuckbunny.mp4", "bikes_mpeg4.avi"):
        (row, *_) = (row for row in rows if row["source"].endswith(name))
        shown[name] = demo.get(f"/audio/{row['bucket_id']}/{row['shard']}/{row['index']}").text
    assert "aac, 48,000 Hz, 6 channels" in shown["bigbuckbunny.mp4"]
    peaks = [float(peak) for peak in re.findall(r" -([\d.]+)V", shown["bigbuckbunny.mp4"])]
    assert len(peaks) == 400 and 0.1 < max(peaks) <= 1 and len(set(peaks)) > 50
    assert "The clip has no audio" in shown["bikes_mpeg4.avi"]


def test_native_clips_show_their_audio_and_silent_ones_do_not(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    sound = chirps(2, 48_000)
    for name, samples in (("whole", sound), ("mute", sound[:, :0])):
        (tmp_path / "in" / f"{name}.mp4").write_bytes(sounding(48, samples))
    options = shard_options(buckets=parse_buckets("96x64@17"), clips="native", workers=1, caption_column="")
    streamvid.shard(tmp_path / "in", tmp_path / "ds", options)
    server, shown = serve(tmp_path / "ds"), {}
    for row in streamvid.open_dataset(tmp_path / "ds").samples_table().to_pylist():
        place = f"{row['bucket_id']}/{row['shard']}/{row['index']}"
        shown[row["source"]] = f'data-src="/audio/{place}"' in server.get(f"/sample/{place}").text
        if shown[row["source"]]:
            assert "aac, 48,000 Hz, 2 channels" in server.get(f"/audio/{place}").text
    assert shown == {"whole.mp4": True, "mute.mp4": False}


def test_answers_forbid_content_from_other_sources(demo: PreviewServer) -> None:
    """SAFE-1: all answers, including errors, forbid content from other sources."""
    for path in ("/", "/nothing", "/static/app.js", f"/sample/{BUCKET}/0/999"):
        headers = demo.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "*" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert not any(name.startswith("access-control") for name in headers)
    page = demo.get("/samples").text
    assert not re.search(r"<script(?! src=\"/static/app\.js\" defer></script>)|\son[a-z]+=|\sstyle=|https?://", page)


def test_hostile_requests_are_refused(demo: PreviewServer) -> None:
    """SAFE-1: DNS rebinding, writing methods, and paths to files of the machine are refused."""
    assert demo.get("/", Host="evil.example").status == 421
    assert demo.get("/", Host="127.0.0.1.evil.example:80").status == 421
    assert demo.get("/", Host="localhost:1234").status == 200
    assert demo.get("/", "POST").status == 405 and demo.get("/", "DELETE").status == 405
    for path in ("/static/..%2fweb%2fserver.py", "/static/../server.py", "/run/..%2f..%2fetc%2fpasswd", "//etc/passwd"):
        assert demo.get(path).status == 404
    for path in (f"/frame/{BUCKET}/0/0/0?width=100000", f"/sample/{BUCKET}/0/0?visit=1e9", "/clip/..%2f..%2f/0/0"):
        assert demo.get(path).status in (200, 400, 404)
    assert demo.get("/").status == 200


def test_a_token_is_required_if_requested(serve: Serve, sharded: Sharded) -> None:
    """SAFE-1: with --token, the link contains the token, and later requests use a cookie."""
    server = serve(sharded.root, "--token")
    link = server.address.removeprefix(server.base)
    assert "token=" in link and len(link) > 30
    assert server.get("/").status == 403 and server.get(link + "x").status == 403
    assert server.get("/static/app.js").status == 403
    first = server.get(link.replace("/?", "/samples?bucket=a&"))
    assert first.status == 303 and first.headers["location"] == "/samples?bucket=a"
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie
    assert server.get("/", Cookie=cookie.split(";")[0]).status == 200
    assert server.get("/", Cookie=cookie.split(";")[0][:-1]).status == 403
    away = server.get("//evil.example/" + link.removeprefix("/"))
    assert away.headers.get("location", "/").startswith("/") and not away.headers.get("location", "").startswith("//")


def test_a_run_is_shown_and_no_other_files(demo: PreviewServer, run_folder: Path, tmp_path: Path) -> None:
    run, secret, server = run_folder, tmp_path / "secret.png", demo
    (run / "samples").mkdir(exist_ok=True)
    secret.write_bytes(b"secret")
    (run / "samples" / "step-7.png").symlink_to(secret)
    (run / "samples" / "step-10.png").write_bytes(b"\x89PNG picture")
    lines = [{"step": step, "loss": 2.0 - step / 10, "lr": 1e-3, "note": "<script>"} for step in range(1, 11)]
    lines[3]["loss"] = None
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + '[1]\nnot json\n{"step": 11, "lo')
    page = server.get("/run").text
    assert "step 10" in page and "Loss <strong>1</strong>" in page and "Held-out" not in page and "<script>" not in page
    assert page.count('src="/run/step-10.png"') == 1
    assert server.get("/run/step-10.png").body == b"\x89PNG picture"
    for name in ("step-7.png", "metrics.jsonl", "..%2fmetrics.jsonl", "step-8.png"):
        answer = server.get(f"/run/{name}")
        assert answer.status == 404 and b"secret" not in answer.body
    (run / "metrics.jsonl").write_text(text + '{"step": 12, "eval_loss": 0.5}\n')
    assert "Held-out loss <strong>0.5</strong>" in server.get("/curves").text


def test_damage_is_shown_and_the_server_keeps_running(serve: Serve, tmp_path: Path) -> None:
    """The server survives a damaged index, a damaged tar, and files that disappear while it runs."""
    root = tmp_path / "ds"
    seal_whole(root)
    server = serve(root)
    dataset = streamvid.open_dataset(root)
    assert server.get("/").status == 200
    (samples,) = root.glob("index/samples-*.parquet")
    data = samples.read_bytes()
    samples.write_bytes(data[:8] + bytes(400) + data[408:])
    for path in ("/figures", "/samples"):
        answer = server.get(path)
        assert answer.status == 500 and samples.name in answer.text and "Traceback" not in answer.text
    samples.write_bytes(data)
    assert server.get("/samples").status == 200
    shard = dataset.shards[0]
    path = f"/sample/{shard.bucket_id}/0/0"
    tar = (root / shard.path).read_bytes()
    (root / shard.path).write_bytes(tar[:512] + b"x" * 100 + tar[612:])
    page = server.get(path)
    assert page.status == 200 and "do not match" in page.text
    (root / shard.path).write_bytes(tar[:600])
    assert server.get(path).status in (200, 502) and shard.path in server.get(path).text
    (root / shard.path).unlink()
    assert server.get(path).status == 502
    shutil.rmtree(root)
    assert server.get("/samples?sort=fps").status >= 500
    assert server.get("/static/app.js").status == 200 and psutil.Process(server.pid).is_running()


def test_a_dataset_in_an_object_store(serve: Serve, sharded: Sharded, moto_server: S3Server, s3_env: S3Env) -> None:
    """FETCH-2: a dataset in an object store is shown like a local one."""
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(sharded.root, bucket, "ds/")
    server = serve(f"s3://{bucket}/ds")
    page = server.get("/samples?where=fps+%3E+26&sort=fps")
    assert len(page.samples) > 3 and f"s3://{bucket}/ds" in page.text and moto_server.secret_key not in page.text
    sample = server.get(page.samples[0]).text
    assert "What the model gets" in sample and "✓ verified" in sample
    assert server.get(page.samples[0].replace("/sample/", "/poster/")).headers["content-type"] == "image/jpeg"


def test_no_dataset_and_a_port_in_use_are_one_line_errors(
    demo: PreviewServer, tmp_path: Path, sharded: Sharded
) -> None:
    done = run_streamvid("preview", tmp_path, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: no dataset at")
    port = demo.base.rpartition(":")[2]
    done = run_streamvid("preview", sharded.root, "--port", port, check=False)
    assert done.returncode == 2 and f"--port {port}: cannot listen on 127.0.0.1" in done.stderr
