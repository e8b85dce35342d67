"""Rules for the names, sizes and assignment of buckets, in exact integer arithmetic."""
