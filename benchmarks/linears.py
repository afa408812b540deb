"""Which stock call is the fastest for a projection here: what `fastgen/linear/cpu.py` rests on.

usage: python benchmarks/linears.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

SHAPES = ((1536, 576), (576, 1536), (576, 576), (49152, 576))
ROWS = (1, 4, 8, 16, 32, 64, 256)


def milliseconds(call: Callable[[torch.Tensor], torch.Tensor], weights: list[torch.Tensor], repeats: int) -> float:
    """Median time of a call; the weights take turns, so that they come from memory as in a model."""
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        call(weights[i % len(weights)])
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2] * 1e3


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print("| weight | rows | float32 linear | transposed | oneDNN | bfloat16 linear |")
    print("|---|---|---|---|---|---|")
    for shape in SHAPES:
        weights = [torch.randn(shape) for _ in range(30 if shape[0] < 8192 else 1)]
        halves = [weight.bfloat16() for weight in weights]
        for rows in ROWS:
            states, repeats = torch.randn(rows, shape[1]), 40 if shape[0] < 8192 else 5
            half = states.bfloat16()
            calls = [
                milliseconds(lambda w, x=states: linear(x, w), weights, repeats),
                milliseconds(lambda w, x=states: torch.mm(w, x.t()).t().contiguous(), weights, repeats),
                milliseconds(
                    lambda w, x=states: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""), weights, repeats
                ),
                milliseconds(lambda w, x=half: linear(x, w), halves, max(repeats // 4, 3)),
            ]
            print(f"| {shape[0]}×{shape[1]} | {rows} | " + " | ".join(f"{ms:.2f}" for ms in calls) + " |")


if __name__ == "__main__":
    main()
