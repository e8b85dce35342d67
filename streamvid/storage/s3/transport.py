"""Transport to S3 and compatible stores.

s3fs finds keys and endpoints, and writes and lists objects. This module signs reads. http.py sends them, because it
needs much less CPU time per request than a full client. Behind a proxy, botocore's HTTP session sends the reads.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from streamvid.storage.options import StorageOptions
from streamvid.storage.s3.errors import connection_error, error_of_body, error_of_client
from streamvid.storage.s3.http import Connections
from streamvid.storage.store import FileState
from streamvid.storage.transport import Body, RequestError, Transport

_log = logging.getLogger(__name__)
_PART_BYTES = 32 * 2**20
_SIGNATURE_SECONDS = 300.0  # a server accepts a signature for 15 minutes, by its own clock
_SIGNATURES_KEPT = 4096
_RENEWED_SECONDS = 1.0
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


class S3Transport(Transport):
    """Transport to one bucket. Create each transport in the process that uses it.

    The transport connects on the first request.
    """

    part_bytes = _PART_BYTES

    def __init__(self, bucket: str, options: StorageOptions) -> None:
        self._bucket, self._options = bucket, options
        self._lock = threading.Lock()
        self._made: tuple[Any, _Signer] | None = None
        self._made_at = 0.0
        self._sender: Callable[[str, Mapping[str, str]], Any] | None = None

    def start(self) -> None:
        self._client()

    def disconnect(self) -> None:
        # Connections close when the last reference to their owner is dropped. A request in progress holds a reference.
        # This method does not wait for the lock, because a thread that holds it may spend some time looking for keys.
        self._sender = self._made = None

    # Reading.

    def state(self, key: str) -> FileState:
        # This request reads one byte, because the response to a failed HEAD request contains no error text.
        response = self._send(key, {"Range": "bytes=0-0"})
        is_whole = False
        try:
            status, headers = response.status_code, response.headers
            total = headers.get("Content-Range", "").rpartition("/")[2]
            if status == 416:  # an empty object; not every server reports its size
                return FileState(key, 0, _version(headers))
            if status == 206 and total.isdigit():
                self._read_some(response, memoryview(bytearray(1)))
                is_whole = True
                return FileState(key, int(total), _version(headers))
            if status == 200:  # an empty object, or a server without ranges
                return FileState(key, int(headers.get("Content-Length", 0)), _version(headers))
            if status == 206:
                raise RequestError("the server sent part of the object, but not the object's size", "transient")
            refused = self._refused(response)
        finally:
            _let_go(response, is_whole)
        if refused.kind == "denied" and not self._is_listed(key, refused):
            raise RequestError("no such object", "absent")
        raise refused

    def _is_listed(self, key: str, refused: RequestError) -> bool:
        # If a user may list only certain prefixes, S3 answers a read of a missing object with "denied", because a read
        # does not meet the condition on the prefix. A listing does, and shows whether the object exists.
        try:
            found = self._call("list_objects_v2", Prefix=key, MaxKeys=1).get("Contents", ())
        except RequestError:
            raise refused from None
        return any(item["Key"] == key for item in found)

    def get(self, key: str, start: int, num_bytes: int, version: str, is_wanted: Callable[[], bool]) -> Body:
        headers = {"Range": f"bytes={start}-{start + num_bytes - 1}"}
        if version:
            headers["If-Match"] = f'"{version}"'
        response = self._send(key, headers)
        is_whole = False
        try:
            self._check_range(response, start, num_bytes)
            data = bytearray(num_bytes)
            left = memoryview(data)
            while left and is_wanted():
                left = left[self._read_some(response, left) :]
            is_whole = not left
            return Body(data, _version(response.headers))
        finally:
            _let_go(response, is_whole)

    def _check_range(self, response: Any, start: int, num_bytes: int) -> None:
        status, headers = response.status_code, response.headers
        if status == 416:
            raise RequestError(
                f"the object ends before byte {start + num_bytes}, where the requested range ends", "short"
            )
        if status == 200:
            raise RequestError(
                "the server ignored the requested range, so it does not behave like an S3 server",
                hint="Check endpoint_url (AWS_ENDPOINT_URL)",
            )
        if status != 206:
            raise self._refused(response)
        said, _, total = headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if said != f"{start}-{start + num_bytes - 1}":
            if total.isdigit() and int(total) < start + num_bytes:
                raise RequestError(
                    f"the object ends at byte {total}, but the read extends to byte {start + num_bytes}", "short"
                )
            raise RequestError("the server sent a range that was not requested", "transient")

    def _read_some(self, response: Any, view: memoryview) -> int:
        try:
            num_bytes: int = response.raw.readinto(view)
        except Exception as error:  # noqa: BLE001 - after any failure of a connection, the next one may work
            raise connection_error(error, "while reading the response") from None
        if not num_bytes:
            raise RequestError("the response ended early", "transient")
        return num_bytes

    def _refused(self, response: Any) -> RequestError:
        try:
            text = response.raw.read(65536).decode("utf-8", "replace")
        except Exception as error:  # noqa: BLE001 - as above
            return connection_error(error, "while reading an error response")
        return error_of_body(response.status_code, text, response.headers, self._options)

    def _send(self, key: str, headers: Mapping[str, str]) -> Any:
        _, signer = self._client()
        url, signed = signer.headers(key)
        try:
            sender = self._sender
            if sender is None:
                sender = self._sender = _sender(url, self._options)
            return sender(url, {**signed, **headers})
        except Exception as error:  # noqa: BLE001 - as above
            parts = urlsplit(url)
            raise connection_error(error, f"({parts.scheme}://{parts.netloc})") from None

    # The client: keys, endpoints, and all infrequent requests.

    def _client(self) -> tuple[Any, _Signer]:
        made = self._made
        if made is None:
            with self._lock:
                if self._made is None:
                    try:
                        filesystem = _filesystem(self._options)
                        self._made_at = time.monotonic()
                        self._made = filesystem, _Signer.of(filesystem, self._bucket, self._options)
                    except Exception as error:  # noqa: BLE001 - s3fs passes on errors from all its dependencies
                        raise error_of_client(error, self._options) from None
                made = self._made
        return made

    def renew(self) -> None:
        # This method does not wait for the lock, because a thread that holds it is already looking for keys, which may
        # take some time.
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._made_at > _RENEWED_SECONDS:  # one renewal serves all requests that failed
                    self._made = None
            finally:
                self._lock.release()

    def _call(self, method: str, **arguments: Any) -> Any:
        filesystem, _ = self._client()
        try:
            return filesystem.call_s3(method, Bucket=self._bucket, **arguments)
        except Exception as error:  # noqa: BLE001 - as above
            raise error_of_client(error, self._options) from None

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            self._call("put_object", Key=key, Body=data, ContentMD5=_md5(data), **condition)
        except RequestError as error:
            if not if_absent or not error.kind == "unsupported":
                raise
            # The store does not support this condition, so check and then write. Two concurrent writers may both
            # succeed.
            try:
                self.state(key)
            except RequestError as absent:
                if absent.kind != "absent":
                    raise
                self.put(key, data)
            else:
                raise RequestError("the object already exists", "conflict") from None

    def copies_from(self, source: Transport) -> bool:
        return isinstance(source, S3Transport) and _place(source._options) == _place(self._options)

    def copy(self, source: Transport, source_key: str, version: str, key: str) -> None:
        self._call("copy_object", Key=key, **_copied(source, source_key, version))

    def copy_part(
        self, source: Transport, source_key: str, version: str, key: str, upload: str, number: int, start: int, end: int
    ) -> str:
        answer = self._call(
            "upload_part_copy",
            Key=key,
            UploadId=upload,
            PartNumber=number,
            CopySourceRange=f"bytes={start}-{end - 1}",
            **_copied(source, source_key, version),
        )
        return str(answer["CopyPartResult"]["ETag"])

    def files(self, prefix: str, following: str = "") -> tuple[list[FileState], str]:
        token = {"ContinuationToken": following} if following else {}
        page = self._call("list_objects_v2", Prefix=prefix, **token)
        files = [
            # An empty object has no version here, because `state` returns none for it either.
            FileState(
                found["Key"],
                int(found["Size"]),
                _version(found) if found["Size"] else "",
                found["LastModified"].timestamp() if "LastModified" in found else 0.0,
            )
            for found in page.get("Contents", ())
        ]
        return files, page["NextContinuationToken"] if page.get("IsTruncated") else ""

    def remove(self, key: str) -> None:
        self._call("delete_object", Key=key)

    def begin_parts(self, key: str) -> str:
        return str(self._call("create_multipart_upload", Key=key)["UploadId"])

    def put_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        answer = self._call(
            "upload_part", Key=key, UploadId=upload, PartNumber=number, Body=data, ContentMD5=_md5(data)
        )
        return str(answer["ETag"])

    def end_parts(self, key: str, upload: str, tags: list[str]) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        self._call("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": parts})

    def abort_parts(self, key: str, upload: str) -> None:
        try:
            self._call("abort_multipart_upload", Key=key, UploadId=upload)
        except RequestError as error:
            if error.kind != "absent":
                raise

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        following: dict[str, str] = {}
        while True:
            try:
                page = self._call("list_multipart_uploads", Prefix=prefix, **following)
            except RequestError as error:
                if error.kind not in ("unsupported", "denied"):
                    raise
                # Without the list, uploads of killed runs cannot be removed. This must not make a completed run fail.
                _log.info(
                    "the store does not list unfinished uploads (%s); they remain until the store removes them", error
                )
                return found
            found += [(upload["Key"], upload["UploadId"]) for upload in page.get("Uploads", ())]
            if not page.get("IsTruncated"):
                return found
            following = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _place(options: StorageOptions) -> tuple[object, ...]:
    """Return the settings that determine which server and access keys are used."""
    return options.endpoint_url, options.region, options.profile, options.anon


def _copied(source: Transport, key: str, version: str) -> dict[str, object]:
    """Return the arguments that specify the source in a copy request."""
    assert isinstance(source, S3Transport)
    condition = {"CopySourceIfMatch": f'"{version}"'} if version else {}
    return {"CopySource": {"Bucket": source._bucket, "Key": key}, **condition}


class _Signer:
    """Signer for GET requests to the objects in a bucket.

    A signature covers neither the byte range nor the version condition of a request, so one signature is reused for all
    reads of an object.
    """

    def __init__(self, base: str, auth: Any, extra: Mapping[str, str]) -> None:
        self._base = base
        self._auth = auth
        self._extra = extra
        self._kept: dict[str, tuple[float, dict[str, str]]] = {}

    @classmethod
    def of(cls, filesystem: Any, bucket: str, options: StorageOptions) -> _Signer:
        """Return a signer that uses the access keys that s3fs finds. Errors from s3fs and botocore propagate."""
        from botocore.auth import S3SigV4Auth
        from fsspec.asyn import sync

        known = "streamvid"
        parts = urlsplit(filesystem.url(f"{bucket}/{known}", expires=60))
        _check_endpoint(parts.netloc)
        base = f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix(known)}"
        extra = {"x-amz-request-payer": "requester"} if options.requester_pays else {}
        if options.anon:
            return cls(base, None, extra)

        async def keys() -> Any:
            found = await filesystem.session.get_credentials()
            return await found.get_frozen_credentials()

        found = sync(filesystem.loop, keys)
        _check_key(found.access_key, "access key", "AWS_ACCESS_KEY_ID")
        _check_key(found.token or "", "session token", "AWS_SESSION_TOKEN")

        region = options.region or filesystem.s3.meta.region_name or "us-east-1"
        region = "us-east-1" if region == "aws-global" else region
        return cls(base, S3SigV4Auth(found, "s3", region), extra)

    def headers(self, key: str) -> tuple[str, dict[str, str]]:
        """Return the URL and headers for a GET request to the object `key`."""
        from botocore.awsrequest import AWSRequest

        url = self._base + quote(key, safe="/~")
        if self._auth is None:
            return url, dict(self._extra)
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is None or kept[0] < now:
            request = AWSRequest("GET", url, headers={**self._extra, "x-amz-content-sha256": _EMPTY_SHA256})
            self._auth.add_auth(request)
            if len(self._kept) >= _SIGNATURES_KEPT:
                self._kept.clear()
            kept = self._kept[key] = (now + _SIGNATURE_SECONDS, dict(request.headers.items()))
        return url, kept[1]


def _check_endpoint(url: str) -> None:
    """Raise RequestError if an endpoint contains credentials."""
    if "@" in url:
        raise RequestError(
            "the endpoint URL must not contain a user name or a password; remove them from the URL",
            hint="Remove them from AWS_ENDPOINT_URL or the AWS config files; the access keys sign all requests",
        )


def _filesystem(options: StorageOptions) -> Any:
    import s3fs

    if options.endpoint_url is None:
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):  # botocore's debug messages would show the URL
            _check_endpoint(os.environ.get(name, ""))
    config: dict[str, object] = {
        # The libraries try once, because remote.py retries.
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": options.connect_seconds,
        "read_timeout": max(30.0, options.stall_seconds),  # a server may take a long time to store a large part
        # Older servers do not support the checksums of newer SDKs; we send Content-MD5.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "http_session_cls": _session_class(),
    }
    if not options.anon:
        config["signature_version"] = "s3v4"
    client = {} if options.region is None else {"region_name": options.region}
    filesystem = s3fs.S3FileSystem(
        anon=options.anon,
        profile=options.profile,
        endpoint_url=options.endpoint_url,
        requester_pays=options.requester_pays,
        client_kwargs=client,
        config_kwargs=config,
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    filesystem.retries = 1
    filesystem.connect()
    return filesystem


def _session_class() -> Any:
    from aiobotocore.httpsession import AIOHTTPSession

    class OneTrySession(AIOHTTPSession):  # type: ignore[misc]
        """Session that, unlike aiohttp's default session, never repeats a PUT.

        A repeated conditional PUT would look like a conflict.
        """

        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            session._retry_connection = False
            return session

    return OneTrySession


def _check_key(value: str, name: str, variable: str) -> None:
    if not all("!" <= character <= "~" for character in value):
        raise RequestError(
            f"the {name} contains invalid characters, such as a line break or a space", hint=f"Check {variable}"
        )


def _let_go(response: Any, is_whole: bool) -> None:
    """Keep the connection for reuse if the whole response was read; otherwise, close the connection."""
    if is_whole:
        response.raw.release_conn()
    else:
        response.raw.close()


def _version(headers: Mapping[str, str]) -> str:
    tag = headers.get("ETag", "")
    return "" if tag.startswith("W/") else tag.strip('"')  # a weak tag cannot be compared


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _sender(url: str, options: StorageOptions) -> Callable[[str, Mapping[str, str]], Any]:
    """Return a function that sends GET requests to the server in `url`, directly or through the configured proxy."""
    from botocore.awsrequest import AWSPreparedRequest
    from botocore.httpsession import URLLib3Session, create_urllib3_context, get_cert_path
    from botocore.utils import get_environ_proxies

    certificates = os.environ.get("AWS_CA_BUNDLE") or True

    def tls() -> ssl.SSLContext:
        context: ssl.SSLContext = create_urllib3_context()
        context.load_verify_locations(get_cert_path(certificates))
        context.verify_mode, context.check_hostname = ssl.CERT_REQUIRED, True
        return context

    proxies = get_environ_proxies(url)
    if not proxies:
        return Connections(url, tls, options.connect_seconds, options.stall_seconds).get
    session = URLLib3Session(
        timeout=(options.connect_seconds, options.stall_seconds),
        max_pool_connections=options.max_requests,
        proxies=proxies,
        verify=certificates,
    )
    return lambda url, headers: session.send(AWSPreparedRequest("GET", url, headers, None, True))
