"""Conversion of S3 errors to RequestError. If a retry cannot help, the error names the settings to check."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from streamvid.storage.options import StorageOptions
from streamvid.storage.transport import RequestError

_SLOW_DOWN = {"SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "Throttling", "TooManyRequests", "503", "429"}
_MAY_PASS = {"InternalError", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "BadDigest"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_ABSENT = {"NoSuchKey", "NoSuchUpload", "404"}
_UNKNOWN = {"NotImplemented", "501"}
_REGION = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
_KEY_SOURCES = "AWS_ACCESS_KEY_ID, AWS_PROFILE, ~/.aws/credentials"
_HINTS = {
    "InvalidAccessKeyId": "The store does not recognize this access key: check AWS_ACCESS_KEY_ID (or AWS_PROFILE and "
    "~/.aws/credentials), and check that endpoint_url (AWS_ENDPOINT_URL) is the server that issued it",
    "SignatureDoesNotMatch": "The secret key does not match the access key: check AWS_SECRET_ACCESS_KEY",
    "InvalidToken": "Check AWS_SESSION_TOKEN: it does not belong to these keys",
    "RequestTimeTooSkewed": "Correct this machine's clock: it differs from the store's by more than 15 minutes",
    "NoSuchBucket": "Check the bucket name and endpoint_url (AWS_ENDPOINT_URL)",
}
_EXPIRED_HINT = (
    "Temporary keys have expired: set new keys and their AWS_SESSION_TOKEN, or use an IAM role or a profile that "
    "renews them"
)
_REGION_HINT = "The bucket is in another region: set region (AWS_REGION)"
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_REGION_TEXT = re.compile(r"<Region>([a-z0-9-]{1,30})</Region>")


def error_of_body(status: int, text: str, headers: Mapping[str, str], options: StorageOptions) -> RequestError:
    """Convert an error response to a RequestError. text: body of the response, which S3 sends as XML."""
    match = _CODE.search(text)
    region = headers.get("x-amz-bucket-region") or (found[1] if (found := _REGION_TEXT.search(text)) else "")
    return _error(match[1] if match else "", status, options, region)


def error_of_client(error: BaseException, options: StorageOptions) -> RequestError:
    """Convert an error from s3fs or botocore to a RequestError. Omit the original text, which may contain keys."""
    if isinstance(error, RequestError):
        return error
    chain = [error, error.__cause__, error.__context__]
    for found in chain:
        response = getattr(found, "response", None)
        if isinstance(response, Mapping) and "Error" in response:
            code = str(response["Error"].get("Code", ""))
            meta: Mapping[str, Any] = response.get("ResponseMetadata", {})
            region = meta.get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
            return _error(code, int(meta.get("HTTPStatusCode", 0)), options, region)
    names = {type(found).__name__ for found in chain if found is not None}
    if names & {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}:
        return RequestError(
            "no complete keys were found",
            hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or profile; for a public "
            "bucket, set anon=True (--anon)",
        )
    if "ProfileNotFound" in names:
        return RequestError(
            f"the profile {options.profile!r} is not in the AWS config files",
            hint="Check profile (AWS_PROFILE), ~/.aws/config and ~/.aws/credentials",
        )
    if names & {"ConfigParseError", "InvalidConfigError"}:
        return RequestError("an AWS config file cannot be parsed", hint="Check ~/.aws/config and ~/.aws/credentials")
    if "ParamValidationError" in names:
        return RequestError("the bucket name or a key is invalid", hint="Check the URL")
    if isinstance(error, FileNotFoundError):
        return RequestError("no such object", "absent")
    if isinstance(error, ImportError):
        return RequestError(f"{error.name} cannot be imported", hint="Run `pip install s3fs`")
    return connection_error(error, "")


def connection_error(error: BaseException, when: str) -> RequestError:
    """Convert a connection error to a RequestError.

    when: text that is appended to the cause, such as "while reading the response".
    """
    names = [type(found).__name__ for found in (error, error.__cause__, error.__context__) if found is not None]
    text = " ".join(str(found) for found in (error, error.__cause__, error.__context__) if found is not None)
    known = {
        "refused": "the connection was refused",
        "reset by peer": "the connection was reset",
        "timed out": "the connection timed out",
        "Name or service not known": "the server's name is unknown",
        "Temporary failure in name resolution": "the server's name cannot be resolved",
        "certificate": "the server's certificate cannot be verified",
        "IncompleteRead": "the response ended early",
        "closed": "the connection was closed",
        "disconnected": "the connection was closed",
        "unreachable": "the network is unreachable",
    }
    cause = next((said for part, said in known.items() if part.lower() in text.lower()), "")
    if not cause and any("timeout" in name.lower() for name in names):
        cause = "the connection timed out"
    cause = cause or f"the connection failed ({names[0]})"
    is_final = "certificate" in cause
    hint = "Check endpoint_url (AWS_ENDPOINT_URL), the network and the server"
    if is_final:
        hint = "Check AWS_CA_BUNDLE and endpoint_url (AWS_ENDPOINT_URL)"
    return RequestError(f"{cause} {when}".strip(), "refused" if is_final else "transient", hint=hint)


def _error(code: str, status: int, options: StorageOptions, region: str) -> RequestError:
    kinds = {code, str(status)}
    words = (str(status) if status else "", code if code != str(status) else "")
    shown = " ".join(filter(None, words)) or "the store reported an error without a code"
    if kinds & _EXPIRED:
        return RequestError(shown, "expired", hint=_EXPIRED_HINT)
    if kinds & _SLOW_DOWN:
        return RequestError(shown, "slow down", hint="The store limits the request rate: lower max_requests")
    if kinds & _UNKNOWN:
        return RequestError(shown, "unsupported", hint="The store does not support this operation")
    if kinds & _MAY_PASS or status >= 500 or status == 408:
        return RequestError(shown, "transient", hint="The store reports a temporary failure: try again later")
    if code in _HINTS:
        return RequestError(shown, hint=_HINTS[code])
    if kinds & _REGION or status in (301, 307):
        return RequestError(shown, hint=f"{_REGION_HINT} to {region}" if region else _REGION_HINT)
    if kinds & _ABSENT:
        return RequestError("no such object", "absent")
    if status == 412 or code == "PreconditionFailed":
        return RequestError("the object was replaced by another version", "conflict")
    if status in (401, 403):
        return RequestError(shown, "denied" if code == "AccessDenied" else "refused", hint=_denied_hint(options))
    return RequestError(shown)


def _denied_hint(options: StorageOptions) -> str:
    if options.anon:
        return "Access without keys is denied: omit anon and set keys"
    return (
        f"These keys ({_KEY_SOURCES}) do not allow this request: check the bucket's policy and name, and whether "
        "requester_pays is needed"
    )
