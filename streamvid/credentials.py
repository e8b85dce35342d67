"""Removal of credentials from paths and URLs, and from messages that quote them (SAFE-1).

A mistyped URL such as `s3:/KEY:SECRET@bucket`, `s3::/…`, `//…` or `KEY:SECRET@bucket` looks like a path. Its secret may
contain slashes. The following are not treated as credentials: an "@" or a colon after the first folder
(`videos/a:b@c.mp4` or `./a:b@c.mp4`), a time (`cam1-12:30@home.mp4`), a drive (`C:\\clips\\a@2x.mp4`), and text with a
space after the colon.
"""

from __future__ import annotations

import re

_NAME = r"[A-Za-z][A-Za-z0-9+.-]+"
_STORES = r"(?:s3a?|gcs|gs|az|abfss?|hf|hdfs|oss|cos|https?|ftp|sftp|ssh|smb|file|memory)"
#: Everything before the user name: `s3://`, `s3:/`, `a::s3://`, `s3;//`, `s3//`, `s3/` (from pathlib), `//` or nothing.
_START = rf"(?:(?:{_NAME}[:;]+)+[/\\]+|{_STORES}[:;.]+[/\\]*|{_STORES}[/\\]+|[:;.]{{0,2}}(?<!\.)[/\\]+)"
_AFTER_START = re.compile(rf"([\s'\"<]*{_START})(?:[^/\\:@]*:.|(?<=://)[^/\\:@]+$)", re.IGNORECASE | re.DOTALL)
_PORT = re.compile(rf"(?:{_NAME}:+)*https?://[^/:@]+:\d{{2,5}}/", re.IGNORECASE)
#: Credentials without a scheme. The user name contains a letter, and the secret is not a time. A secret that contains a
#: slash has at least six characters.
_BARE = re.compile(
    rf"(?!{_STORES}:+/)(?=[^:]*[A-Za-z])[^\s/\\:@=,(\[{{]{{2,}}:(?!//)(?!(?<=\d:)[\d:.,+Z-]*$)(?:[^\s/\\]+|\S{{6,}})$",
    re.IGNORECASE,
)
#: Word of a message. Spaces, quotes, angle brackets and vertical bars separate words.
_WORD = re.compile(r"[^\s'\"`<>|]+")
#: Text that may precede a location within a word: the dashes of a flag, an equals sign, a comma or a bracket.
_LEAD = re.compile(r"^-+|[=,(\[{}]")
#: Parameters of presigned URLs that grant access, with their values.
_SIGNED = re.compile(
    r"([?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature|AWSAccessKeyId|GoogleAccessId|sig|"
    r"(?:access_)?token)=)[^&\s'\"`<>|]+",
    re.IGNORECASE,
)


def hide_credentials(location: str) -> str:
    """Return a path or URL with any user name, password and presigned-URL signature removed."""
    return _hide_in_word(_SIGNED.sub(r"\1", location))


def hide_all_credentials(text: str) -> str:
    """Return a message with user names, passwords and signatures removed from every path and URL that it quotes."""
    text = _SIGNED.sub(r"\1", text)
    return _WORD.sub(lambda word: _hide_in_word(word[0]), text) if "@" in text or "%40" in text else text


def _hide_in_word(word: str) -> str:
    if "@" not in word:
        decoded = word.replace("%40", "@")  # an "@" that is percent-encoded by mistake
        hidden = word if decoded == word else _hide_in_word(decoded)
        return word if hidden == decoded else hidden
    last = word.rindex("@")
    for start in (0, *(lead.end() for lead in _LEAD.finditer(word, 0, last))):
        if (hidden := _hide_at_start(word[start:])) != word[start:]:
            return word[:start] + hidden
    return word


def _hide_at_start(location: str) -> str:
    before, _, after = location.rpartition("@")
    if _PORT.match(before):
        return location
    if found := _AFTER_START.match(before):
        return found[1] + after
    return after if _BARE.match(before) else location
