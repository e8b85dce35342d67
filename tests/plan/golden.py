"""The golden plans: what tests/data/plan_golden.json holds, and how it was written.

`python -m tests.plan.golden` writes the plans anew: only together with a new PLAN_VERSION.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

from streamvid.plan import PLAN_VERSION, Cursor, EpochPlan, PlanOptions, PlanSource, Step

PATH = Path(__file__).parents[1] / "data" / "plan_golden.json"


def golden_plan(case: dict[str, Any]) -> EpochPlan:
    sources: Any = case.get("num_samples")
    if sources is None:
        sources = [
            PlanSource(source["num_samples"], source["seed"], Fraction(source["num_repeats"]))
            for source in case["sources"]
        ]
    options, cursor = PlanOptions(**case["options"]), Cursor.from_json(case["cursor"])
    return EpochPlan(sources, case["batch_sizes"], options, case["num_ranks"], cursor, case.get("costs"))


def step_to_json(step: Step) -> list[Any]:
    """[bucket of each rank, or the one of all; shards; indices; visits; sources where there are several]."""
    names = list(step.bucket_ids)
    value = [names[0] if len(set(names)) == 1 else names, step.shards.tolist(), step.indices.tolist()]
    value.append(step.visits.tolist())
    return [*value, step.sources.tolist()] if step.sources.any() else value


def main() -> None:
    golden = json.loads(PATH.read_text())
    first = golden["plans"][0]
    buckets, sizes = first["num_samples"], first["batch_sizes"]
    more = {"256px-16f-16x9": [4, 9], "832x480-81f": [3]}
    mix = [
        {"num_samples": buckets, "seed": 5, "num_repeats": "1"},
        {"num_samples": more, "seed": 6, "num_repeats": "3/2"},
    ]
    costs = {"256px-16f-16x9": 100, "832x480-81f": 108, "480x832-81f": 300}
    plain = {"num_samples": buckets, "batch_sizes": sizes, "num_ranks": 2, "cursor": {"epoch": 0, "positions": {}}}
    later = {"epoch": 3, "positions": {"256px-16f-16x9": 60}, "phase": 1}
    wide = {"num_samples": {"256px-16f-16x9": [90, 80, 60]}, "batch_sizes": {"256px-16f-16x9": 25}, "num_ranks": 6}
    cases = [
        {**plain, "options": {"tail": "shrink"}},
        {**plain, "options": {"tail": "uneven"}, "num_ranks": 3},
        {**plain, "options": {"tail": "pad", "sync": "cost", "accumulate": 4}, "num_ranks": 3, "costs": costs},
        {**plain, "options": {"sync": "cost", "order": "largest-first"}, "costs": costs},
        {**plain, "options": {"tail": "drop", "accumulate": 3, "shuffle": "shards"}, "cursor": later},
        {**plain, "options": {"tail": "pad"}, **wide, "cursor": {"epoch": 0, "positions": {}}},
        {**plain, "options": {"tail": "pad", "seed": 7}, "num_samples": None, "sources": mix},
        {**plain, "options": {"tail": "shrink", "sync": "cost"}, "num_samples": None, "sources": mix, "costs": costs,
         "cursor": {"epoch": 2, "positions": {}}},
    ]  # fmt: skip
    golden["plans"] = [case for case in golden["plans"] if not case.get("since")]
    for case in cases:
        golden["plans"].append({k: v for k, v in case.items() if v is not None} | {"since": 2, "stop": 10**6})
    for case in golden["plans"][-len(cases) :]:  # those of older versions stay as they were written
        plan = golden_plan(case)
        case["stop"] = min(case["stop"], plan.num_steps_left)
        case["num_steps_left"] = plan.num_steps_left
        case["steps"] = [step_to_json(step) for step in plan.steps(0, case["stop"])]
        case["cursor_after"] = plan.cursor_after(case["stop"]).to_json()
    golden["plan_version"] = PLAN_VERSION
    PATH.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
