"""Work on several machines: shares of work, leases, and the engines that run shares on a Ray or Slurm cluster.

The sharder and the encoder divide their work into tasks that need no coordinator (`share.py`). `ray.py` and `slurm.py`
only start these tasks; neither knows what a task does. `lease.py` prevents concurrent runs at the same destination.
"""
