"""Does a patched model give what it gave before? Each class ends paged or hf, and equal, or the check says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import zoo

import fastgen

NEW_TOKENS = 12
LENGTHS = (13, 5, 9)
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "output_logits": True, "return_dict_in_generate": True},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "several": {"do_sample": True, "num_return_sequences": 2},
}
TOLERANCE = 1e-4
"""Largest difference of logits that counts as rounding, as a share of their spread."""


@dataclass(frozen=True)
class Outcome:
    """What became of one class."""

    path: str
    """``"paged"`` only where every call was."""
    reason: str
    faults: tuple[str, ...]
    """What differs from the model before the patch; none for a class that passes."""
    distinct: int = 0
    """Distinct tokens in the most varied greedy continuation."""
    raises: str = ""
    """The exception of the unpatched model's own ``generate``, if any."""


def check(model_type: str) -> Outcome:
    """Run every call before and after the patch. Raises `zoo.CannotBuild`."""
    model = zoo.build(model_type)
    expected = {name: _generate(model, call) for name, call in CALLS.items()}
    try:
        fastgen.patch(model)
    except Exception as error:
        return Outcome("none", "", (f"patch raises {error!r}",))
    faults: list[str] = []
    paths: dict[str, tuple[str, str]] = {}
    for name, call in CALLS.items():
        actual = _generate(model, call)
        last = fastgen.status(model).last_call
        paths[name] = (last.path, last.reason) if last is not None else ("none", "no last call")
        faults += [f"{name}: {fault}" for fault in _differences(expected[name], actual)]
    status = fastgen.status(model)
    if status.blocks_free + status.blocks_cached != status.blocks_total:
        faults.append(f"blocks lost: {status.blocks_free} free, {status.blocks_cached} cached of {status.blocks_total}")
    path, reason = next((taken for taken in paths.values() if taken[0] != "paged"), paths["greedy"])
    greedy = expected["greedy"]
    if isinstance(greedy, Exception):
        return Outcome(path, reason, tuple(faults), raises=" ".join(repr(greedy).split())[:160])
    distinct = max(len(set(row[max(LENGTHS) :].tolist())) for row in greedy.sequences)
    return Outcome(path, reason, tuple(faults), distinct)


def prompts() -> dict[str, torch.Tensor]:
    """A left-padded batch."""
    generator = torch.Generator().manual_seed(1)
    longest = max(LENGTHS)
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in LENGTHS])
    return {"input_ids": torch.randint(3, zoo.VOCAB, mask.shape, generator=generator) * mask, "attention_mask": mask}


def _generate(model: Any, call: dict[str, Any]) -> Any:
    """The output, or the exception."""
    torch.manual_seed(0)
    try:
        return model.generate(**prompts(), max_new_tokens=NEW_TOKENS, **call)
    except Exception as error:
        return error


def _differences(expected: Any, actual: Any) -> list[str]:
    if isinstance(expected, Exception) or isinstance(actual, Exception):
        return [] if type(expected) is type(actual) else [f"{_short(actual)} instead of {_short(expected)}"]
    if isinstance(expected, torch.Tensor):
        return [] if torch.equal(expected, actual) else ["ids differ"]
    faults = _differences(expected.sequences, actual.sequences)
    if not faults:
        worst = max(map(_distance, expected.logits, actual.logits))
        if not worst <= TOLERANCE:
            faults.append(f"logits differ by {worst:.1e} of their spread")
    return faults


def _distance(expected: torch.Tensor, actual: torch.Tensor) -> float:
    finite = expected.isfinite()
    if expected.shape != actual.shape or not torch.equal(expected[~finite], actual[~finite]):
        return float("inf")
    return float((expected - actual)[finite].abs().max() / expected[finite].std())


def _short(outcome: Any) -> str:
    return " ".join(repr(outcome).split())[:160] if isinstance(outcome, Exception) else "a result"
