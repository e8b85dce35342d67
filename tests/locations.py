"""Locations as users type them: URLs with credentials, mistyped in many ways, and ordinary paths that resemble them."""

from __future__ import annotations

import re

from hypothesis import strategies as st

#: Part of every secret, so that a partially shown secret is found too.
CANARY = "CANARY"
STARTS = (
    *("", "/", "//", "///", "://", ":/", "s3:", "s3:/", "s3://", "s3:///", "s3::/", "s3::", "s3//", "s3;//", "S3:/"),
    *("s3a:/", "gs:/", "hdfs:/", "hdfs://", "https:/", "https://", "sss3://", "simplecache::s3://", "\\\\", "s3:\\"),
)
#: No secret begins with "//" or with digits and a slash, because that would be a scheme or a port.
_secrets = st.builds(
    "{}CANARY{}".format,
    st.text("abcXYZ019+/", max_size=8).filter(lambda text: not re.match(r"//|\d+/", text)),
    st.text("abcXYZ019+/=", max_size=8),
)
mistyped = st.builds(
    "{}{}:{}@{}".format,
    st.sampled_from(STARTS),
    st.sampled_from(["KEY", "AKIAIOSFODNN7EXAMPLE", "7f3e0a", "my-key", "minio_admin"]),
    _secrets,
    st.sampled_from(["b", "bucket/ds", "bucket/clip.mp4", "b/a@2x.mp4"]),
)
"""URLs with credentials, correct and mistyped."""

ORDINARY = (
    *("video@2x.mp4", "12:30@home.mp4", "cam1-12:30@home.mp4", "2026-05-01T12:30:00@cam1.mp4", "me@example.com.mp4"),
    *("part 1: intro/a@2x.mp4", "videos/a:b@c.mp4", "videos/KEY:SECRET@b.mp4", "./KEY:SECRET@b.mp4", "0:00-0:01"),
    *(
        "C:\\clips\\a@2x.mp4",
        "C:/clips/a@2x.mp4",
        "/data/12:30@home.mp4",
        "/data/KEY:SECRET@b",
        "s3://bucket/a:b@c.mp4",
    ),
    *("s3://bucket/a@2x.mp4", "file:///home/me/a@2x.mp4", "http://host:9000/a@2x.mp4", "~/a:b@c.mp4", "../a:b@c.mp4"),
    *("//server/share/a@2x.mp4", "videos//a:b@c.mp4", "a person: me@example.com", "from 0:00 to 0:01 @home"),
)
"""Paths, URLs and other texts without credentials."""
