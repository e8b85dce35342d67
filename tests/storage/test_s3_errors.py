"""Tests of S3 errors, which must name the setting to check, and of invalid URLs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamvid.errors import ConfigError, StorageError
from streamvid.storage import StorageOptions, open_store, redact
from streamvid.storage.s3.errors import error_of_body
from streamvid.storage.transport import RequestError
from tests.servers import Rgw, S3Env, S3Server


def body(code: str, extra: str = "") -> str:
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return f"{head}<Error><Code>{code}</Code><Message>secret text</Message>{extra}<HostId>x</HostId></Error>"


@pytest.mark.parametrize(
    ("status", "code", "named"),
    [
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        (400, "InvalidToken", "AWS_SESSION_TOKEN"),
        (403, "RequestTimeTooSkewed", "clock"),
        (403, "AccessDenied", "policy"),
        (403, "AccessDenied", "requester_pays"),
        (404, "NoSuchBucket", "endpoint_url"),
        (301, "PermanentRedirect", "region"),
        (307, "TemporaryRedirect", "AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", "region"),
    ],
)
def test_a_refusal_names_the_setting_and_is_final(status: int, code: str, named: str) -> None:
    error = error_of_body(status, body(code), {}, StorageOptions())
    assert named in error.hint and error.kind in ("refused", "denied")
    assert error.cause == f"{status} {code}" and "secret text" not in error.hint


def test_the_bucket_s_region_is_shown_if_the_server_reports_it() -> None:
    for text, headers in (
        (body("PermanentRedirect"), {"x-amz-bucket-region": "eu-west-3"}),
        (body("AuthorizationHeaderMalformed", "<Region>eu-west-3</Region>"), {}),
        ("", {"x-amz-bucket-region": "eu-west-3"}),
    ):
        status = 400 if "Malformed" in text else 301
        assert "to eu-west-3" in error_of_body(status, text, headers, StorageOptions()).hint


def test_keys_are_suggested_if_none_were_given() -> None:
    hint = error_of_body(403, body("AccessDenied"), {}, StorageOptions(anon=True)).hint
    assert "without keys" in hint and "anon" in hint


@pytest.mark.parametrize(
    ("status", "text", "is_slow_down"),
    [
        (500, body("InternalError"), False),
        (502, "<html>bad gateway</html>", False),
        (503, body("SlowDown"), True),
        (503, "", True),
        (429, "", True),
        (400, body("RequestTimeout"), False),
        (408, "", False),
        (409, body("OperationAborted"), False),
        (409, body("ConditionalRequestConflict"), False),
    ],
)
def test_store_problems_are_transient(status: int, text: str, is_slow_down: bool) -> None:
    error = error_of_body(status, text, {}, StorageOptions())
    assert error.kind == ("slow down" if is_slow_down else "transient") and error.is_transient


def test_each_kind_of_response_is_recognized() -> None:
    def error(status: int, code: str = "") -> RequestError:
        return error_of_body(status, body(code) if code else "", {}, StorageOptions())

    assert {error(404, code).kind for code in ("NoSuchKey", "", "NoSuchUpload")} == {"absent"}
    assert error(412, "PreconditionFailed").kind == error(412).kind == "conflict"
    assert error(501, "NotImplemented").kind == "unsupported" and not error(501).is_transient
    assert error(400, "ExpiredToken").kind == "expired" and error(403, "RequestExpired").is_transient
    assert not error(418).is_transient and "418" in error(418).cause


# Access.


def test_a_public_bucket_is_read_without_keys(rgw: Rgw, s3_env: S3Env, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_env(rgw)
    bucket, secret = rgw.new_bucket(), rgw.new_bucket()
    for name in (bucket, secret):
        rgw.put(name, "to/x", b"public")
    allowed = [{"Effect": "Allow", "Principal": {"AWS": ["*"]}, "Action": ["s3:GetObject", "s3:ListBucket"]}]
    allowed[0]["Resource"] = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    rgw.client.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": allowed}))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    store = open_store(f"s3://{bucket}/to", StorageOptions(anon=True))
    assert store.read("x") == b"public" and [state.path for state in store.files()] == ["x"]
    with pytest.raises(StorageError, match=r"cannot write y: 403 AccessDenied\. Access without keys is denied"):
        store.put("y", b"")
    with pytest.raises(
        StorageError, match=r"cannot access x: 403 AccessDenied\. Access without keys is denied: .*anon"
    ):
        open_store(f"s3://{secret}/to", StorageOptions(anon=True)).read("x")
    with pytest.raises(StorageError, match=r"no complete keys were found\. Set AWS_ACCESS_KEY_ID .*anon=True"):
        open_store(f"s3://{bucket}/to").read("x")


def test_a_profile_has_keys_and_endpoint(
    rgw: Rgw, s3_env: S3Env, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    s3_env(rgw)
    bucket = rgw.new_bucket()
    rgw.put(bucket, "x", b"mine")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    config, credentials = tmp_path / "config", tmp_path / "credentials"
    config.write_text(f"[profile mine]\nregion = us-east-1\nendpoint_url = {rgw.endpoint_url}\n")
    credentials.write_text(f"[mine]\naws_access_key_id = {rgw.access_key}\naws_secret_access_key = {rgw.secret_key}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    assert open_store(f"s3://{bucket}", StorageOptions(profile="mine")).read("x") == b"mine"
    with pytest.raises(StorageError, match=r"the profile 'yours' is not in the AWS config files\. Check profile"):
        open_store(f"s3://{bucket}", StorageOptions(profile="yours")).read("x")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    store = open_store(f"s3://{bucket}")
    store.put("y", b"too")
    assert store.read("y") == b"too" and rgw.read(bucket, "y") == b"too"


def test_requester_pays_is_sent_and_signed(moto_server: S3Server, s3_env: S3Env) -> None:
    s3_env(moto_server)
    store = open_store(f"s3://{moto_server.new_bucket()}", StorageOptions(requester_pays=True, region="eu-west-3"))
    store.put("x", b"x")
    assert store.read("x") == b"x" and len(list(store.files())) == 1


# URLs.


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///x",
        "s3:////x",
        "s3://bucket/../x",
        "s3://bucket/a/../../x",
        "s3://bucket/./x",
        "s3://bucket//x",
        "s3://bucket/a\\b",
        "s3://bucket/a\0b",
        "s3://KEY:CANARY@bucket/x",
        "s3://KEY:CAN/ARY@bucket/x",
        "s3://KEY:12/CANARY@bucket/x",
        "s3://KEY:CAN/A@R/Y@bucket/x",
        "s3://CANARY@bucket/x",
        "s3://bucket/x?secret=CANARY",
        "s3://bucket/x#CANARY",
        "s3://bucket:port/x",
        "S3://KEY:CANARY@bucket",
        "http://user:CANARY@host/x",
        "https://host/x?X-Amz-Signature=CANARY",
        "pipe:cat x",
        "pipe://cat x",
        "simplecache::s3://KEY:CANARY@bucket/x",
        "simplecache::s3://KEY:CAN/ARY@bucket/x",
        "zip://x::s3://KEY:CANARY@bucket/x",
        "filecache::s3://bucket/x?CANARY",
        "reference://x",
        "git://x",
        "data:text/plain,x",
        "ftp://user:CANARY@host:21/x",
    ],
)
def test_no_store_opens_for_an_invalid_url(url: str) -> None:
    """SAFE-1."""
    for call in (open_store, lambda url: open_store(url, StorageOptions(anon=True))):
        with pytest.raises((ConfigError, StorageError)) as error:
            call(url)
        assert not [part for part in ("CAN", "ARY", "KEY:") if part in str(error.value)]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://k:a/b@bucket/x", "s3://bucket/x"),
        ("s3://k:1/b@bucket/x", "s3://bucket/x"),
        ("http://host:80/x@y", "http://host:80/x@y"),
        ("s3://bucket/x@y", "s3://bucket/x@y"),
        ("s3://bucket", "s3://bucket"),
        ("http://[::1]:9000/x", "http://[::1]:9000/x"),
        ("http://u:p@[::1]:9000/x?q", "http://[::1]:9000/x"),
        ("https://host:8080/x#f", "https://host:8080/x"),
    ],
)
def test_redact_keeps_everything_but_secrets(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    "given",
    [
        {"secret": "CANARY"},
        {"aws_secret_access_key": "CANARY"},
        {"endpoint_url": "http://key:CANARY@host"},
        {"endpoint_url": "http://host/?key=CANARY"},
        {"endpoint_url": "CANARY"},
    ],
)
def test_a_secret_in_the_options_is_refused_and_not_shown(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        StorageOptions.of(given)
    assert "CANARY" not in str(error.value)


@pytest.mark.parametrize(("variable", "value"), [
    ("AWS_ACCESS_KEY_ID", "testkey\n"), ("AWS_ACCESS_KEY_ID", "test–key"), ("AWS_SESSION_TOKEN", "token\r")
])  # fmt: skip
def test_an_invalid_key_is_an_error_at_once(
    s3_env: S3Env, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """A line break at the end of a secret file is reported at once instead of being retried for fifty seconds."""
    s3_env(moto_server)
    monkeypatch.setenv(variable, value)
    store = open_store("s3://some-bucket/ds")
    with pytest.raises(StorageError, match=f"Check {variable}") as caught:
        store.read("manifest.json")
    assert value not in str(caught.value)
    assert store.stats().num_retries == 0


def test_an_s3_url_with_one_slash_is_not_a_folder() -> None:
    with pytest.raises(StorageError, match="did you mean 's3://bucket/ds'"):
        open_store("s3:/bucket/ds")


def test_an_invalid_bucket_name_is_an_error_at_once() -> None:
    options = StorageOptions(endpoint_url="http://127.0.0.1:9", region="us-east-1")
    with pytest.raises(StorageError, match="the bucket name or a key is invalid"):
        open_store("s3://b[1]/ds", options).read("manifest.json")


def test_a_damaged_aws_config_file_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text("aws_access_key_id = SECRET\n[default\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    options = StorageOptions(endpoint_url="http://127.0.0.1:9", region="us-east-1")
    with pytest.raises(StorageError, match="an AWS config file cannot be parsed") as raised:
        open_store("s3://bucket/ds", options).read("manifest.json")
    assert "SECRET" not in str(raised.value)
