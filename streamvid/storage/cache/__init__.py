"""Local disk cache for object stores. store.py uses blocks.py, which uses files.py."""
