"""Write docs/models.md: `python tests/zoo_table.py [results.json]`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers
import zoo
from zoo_check import Outcome, check

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def main() -> None:
    transformers.logging.set_verbosity_error()
    outcomes: dict[tuple[str, str], Outcome] = {}
    for model_type, cls in zoo.names():
        try:
            outcomes[model_type, cls] = check(model_type)
        except zoo.CannotBuild as error:
            outcomes[model_type, cls] = Outcome("not built", str(error), ())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(outcomes))
    if len(sys.argv) > 1:
        rows = [{"model_type": m, "class": c} | dataclasses.asdict(o) for (m, c), o in outcomes.items()]
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1))


def page(outcomes: dict[tuple[str, str], Outcome]) -> str:
    counts = Counter(outcome.path for outcome in outcomes.values())
    unequal = sum(bool(outcome.faults) for outcome in outcomes.values())
    lines = [
        "# Models",
        "",
        "Tiny random models of every class behind `AutoModelForCausalLM`, each compared before and after",
        "`fastgen.patch`: greedy with logits, sampled with a seed, and several sequences a prompt.",
        "",
        f"* transformers {transformers.__version__}, torch {torch.__version__}: {len(outcomes)} classes.",
        f"* {counts['paged']} take the paged path, {counts['hf']} the original one; {unequal} differ from it.",
        f"* {counts['not built']} could not be built here.",
        "",
        "Made by `python tests/zoo_table.py`.",
        "",
        "| class | path | reason |",
        "|---|---|---|",
    ]
    for (_, cls), outcome in sorted(outcomes.items(), key=lambda item: item[0][1].lower()):
        notes = [outcome.reason]
        notes += [f"the original raises too: {outcome.raises}"] if outcome.raises and not outcome.faults else []
        notes += [f"**{fault}**" for fault in outcome.faults]
        lines.append(f"| {cls} | {outcome.path} | {'; '.join(notes)} |".replace("\n", " "))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
