"""Rows and groups of rows, as the engine sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fastgen.cache.blocks import BlockTable


@dataclass(eq=False)
class Row:
    """One sequence: its tokens, and how many of them the cache holds."""

    token_ids: list[int]
    max_tokens: int
    """Most tokens that this row can grow to, the prompt included."""
    position_ids: list[int] | None = None
    """Positions of the prompt where the caller gave them; a later token's is one more than the one before."""
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    """Leading tokens whose keys and values lie in the cache."""
    finished: bool = False

    @property
    def max_cached(self) -> int:
        """Most tokens that the cache has to hold: the last one is never run."""
        return self.max_tokens - 1

    @property
    def pending(self) -> int:
        """Tokens still to run before the next one can be chosen."""
        return len(self.token_ids) - self.computed

    def positions(self, start: int, stop: int) -> list[int]:
        if self.position_ids is None:
            return list(range(start, stop))
        prompt = len(self.position_ids)
        offset = self.position_ids[-1] + 1 - prompt
        return self.position_ids[start:stop] + list(range(max(start, prompt) + offset, stop + offset))


class Group(ABC):
    """Rows that choose their tokens together, once each of them has its logits."""

    rows: Sequence[Row]

    @property
    def active(self) -> list[Row]:
        return [row for row in self.rows if not row.finished]

    @property
    def finished(self) -> bool:
        return all(row.finished for row in self.rows)

    greedy = False
    """Whether the next token of every row is the largest logit, with nothing else to see it."""

    @abstractmethod
    def advance(self, logits: torch.Tensor) -> None:
        """Choose a token for every active row and mark the rows that end.

        Args:
            logits: ``[active rows, vocabulary]``, as the model gave them; the group may keep them.
        """

    def accept(self, tokens: list[int]) -> None:
        """The same for a :attr:`greedy` group: ``tokens`` are the largest logits of the active rows."""
        raise NotImplementedError
