"""Rules for naming, sizing and assigning buckets, in exact integer arithmetic."""
