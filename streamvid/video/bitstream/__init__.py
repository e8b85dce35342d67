"""Parsers for the headers of coded pictures and image files, without any library."""
