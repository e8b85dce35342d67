"""Decode processes, the memory they share with the loader, and the messages between them.

May import `loader/view` and the rooms below the loader; never torch. Read messages.py, arena.py, worker.py, reader.py,
pool.py, in that order; cache.py is a tool for the threads that read.
"""
