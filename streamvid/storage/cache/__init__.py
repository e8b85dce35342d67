"""Local disk cache in front of object stores: store.py uses blocks.py, which uses files.py."""
