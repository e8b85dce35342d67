"""Rules for the names, sizes and assignment of buckets, in exact integer arithmetic."""

from __future__ import annotations

from streamvid.buckets.batch_size import batch_sizes
from streamvid.buckets.bucket import Bucket, match_buckets, parse_bucket, parse_buckets
from streamvid.buckets.geometry import aspect_table, resolution_pixels
from streamvid.buckets.table import BucketTable

__all__ = [
    "Bucket",
    "BucketTable",
    "aspect_table",
    "batch_sizes",
    "match_buckets",
    "parse_bucket",
    "parse_buckets",
    "resolution_pixels",
]
