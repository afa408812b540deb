"""The fixed requests that the benchmarks run. They never change, so that results of different versions compare.

W32 is 32 requests with prompts and outputs of 16 to 256 tokens, both uniform; SINGLE is its first four, one after
another. CHAT16 is 16 requests of 64 output tokens that share a prefix of 192 tokens and have 32 of their own; nothing
runs it before there is a prefix cache. Decoding is greedy and runs to the full length: no end-of-sequence token is
heeded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SHORTEST, LONGEST = 16, 256
FIRST_ID, LAST_ID = 5, 48999


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens continue it."""

    prompt: list[int]
    output: int


def w32(count: int = 32, max_output: int | None = None) -> list[Request]:
    """The 32 requests, or for a quick run the first ``count``, with outputs of at most ``max_output`` tokens."""
    generator = random.Random(0)
    prompts = [generator.randint(SHORTEST, LONGEST) for _ in range(32)]
    outputs = [generator.randint(SHORTEST, LONGEST) for _ in range(32)]
    requests = [
        Request([generator.randint(FIRST_ID, LAST_ID) for _ in range(prompt)], min(output, max_output or output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return requests[:count]


def single(requests: list[Request]) -> list[Request]:
    """The requests of the one-stream benchmark."""
    return requests[:4]


def chat16() -> list[Request]:
    """The 16 requests with one prefix."""
    generator = random.Random(1)
    prefix = [generator.randint(FIRST_ID, LAST_ID) for _ in range(192)]
    return [Request(prefix + [generator.randint(FIRST_ID, LAST_ID) for _ in range(32)], 64) for _ in range(16)]


def padded_batches(requests: list[Request], size: int) -> list[list[int]]:
    """Indices of ``requests`` in batches of ``size``, sorted by output so that a batch wastes few steps."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].output)
    return [order[start : start + size] for start in range(0, len(order), size)]
