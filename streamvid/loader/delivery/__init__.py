"""Pipeline from plan steps to complete batches in the ring, ahead of the caller; bad samples are replaced (BAD-1).

It may import `loader/view`, `loader/workers`, mix.py and options.py, but never torch. Read delivery.py, requests.py,
pipeline.py, flight.py, then decoded.py or stored.py (the kinds of delivery), and repair.py.
"""
