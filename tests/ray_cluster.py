"""A Ray cluster of three raylets on this machine, in a process of its own, because Ray handles the signals of its process.

Prints its address. Reads lines from standard input: "add" starts a raylet, "kill" kills that one; each is answered.
Ends with its input.
"""

from __future__ import annotations

import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    added = [cluster.add_node(num_cpus=1) for _ in range(2)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "add\n":
            added.append(cluster.add_node(num_cpus=1))
        else:
            cluster.remove_node(added.pop(), allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
