"""Golden plans of tests/data/plan_golden.json.

`python -m tests.plan.golden` recomputes their steps. Run it only together with a new PLAN_VERSION.
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
    """Return [bucket per rank or one for all, shards, indices, visits, and sources if there are several]."""
    names = list(step.bucket_ids)
    value = [names[0] if len(set(names)) == 1 else names, step.shards.tolist(), step.indices.tolist()]
    value.append(step.visits.tolist())
    return [*value, step.sources.tolist()] if step.sources.any() else value


def main() -> None:
    golden = json.loads(PATH.read_text())
    for case in golden["plans"]:
        plan = golden_plan(case)
        case["stop"] = min(case["stop"], plan.num_steps_left)
        case["num_steps_left"] = plan.num_steps_left
        case["steps"] = [step_to_json(step) for step in plan.steps(0, case["stop"])]
        case["cursor_after"] = plan.cursor_after(case["stop"]).to_json()
    golden["plan_version"] = PLAN_VERSION
    PATH.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
