"""The local disk cache in front of object stores: store.py on top of blocks.py on top of files.py."""
