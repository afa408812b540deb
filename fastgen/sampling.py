"""Token choice, as transformers makes it."""

from __future__ import annotations

import torch


def choose(scores: torch.Tensor, do_sample: bool, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token a row from processed ``scores`` ``[rows, vocabulary]``.

    Sampling is a single ``multinomial`` over all rows, so that a seed gives what ``generate`` gives: the draws for a
    row depend on how many rows there are.
    """
    if not do_sample:
        return torch.argmax(scores, dim=-1)
    return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1, generator=generator).squeeze(1)
