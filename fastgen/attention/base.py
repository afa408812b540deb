"""The contract between a step, the pool and an attention backend, and the registry of backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from fastgen.cache.pool import LayerCache


@dataclass(frozen=True)
class Span:
    """One row's share of a packed step."""

    start: int
    """Offset of its first query among the packed tokens."""
    length: int
    """Queries: 1 when decoding, more in a prompt."""
    context: int
    """Keys, those of this step included. Query ``i`` sees keys up to ``context - length + i``."""
    first_slot: int | None = None
    """The row's first slot when its blocks are contiguous, else ``None``."""
    room: int = 0
    """Slots from :attr:`first_slot` on that no other row uses; behind the row's own tokens they hold zeros."""
    blocks: torch.Tensor | None = None
    """Block numbers ``[n]`` when they are not contiguous."""


@dataclass(frozen=True)
class StepLayout:
    """Where the tokens of one packed forward lie."""

    spans: list[Span]
    slots: torch.Tensor
    """``[T]``: the slot each token's key and value are written to."""
    block_size: int
    _plans: dict[Hashable, Any] = field(default_factory=dict)

    def plan(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What a backend works out from the layout once for all layers that share ``key``."""
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    def to(self, device: torch.device) -> StepLayout:
        spans = [span if span.blocks is None else replace(span, blocks=span.blocks.to(device)) for span in self.spans]
        return StepLayout(spans, self.slots.to(device), self.block_size)


@dataclass(frozen=True)
class Scoring:
    """How scores are made from queries and keys; fields as in transformers' attention interface."""

    scale: float
    window: int = 0
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """``[heads]``: a logit a head that takes part in the softmax and nothing else."""


class AttentionBackend(ABC):
    """Writes a step's keys and values into the pool and attends over each row's own blocks.

    A backend knows tensors and the step's layout, nothing of requests. It may be called from several threads, for
    different layers' caches or for disjoint slots of the same one.
    """

    name: str

    def write(self, cache: LayerCache, layout: StepLayout, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store ``keys`` ``[kv_heads, T, key_dim]`` and ``values`` ``[kv_heads, T, value_dim]`` in the step's slots."""
        cache.keys.index_copy_(1, layout.slots, keys.to(cache.keys.dtype))
        cache.values.index_copy_(1, layout.slots, values.to(cache.values.dtype))

    @abstractmethod
    def attend(self, query: torch.Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring) -> torch.Tensor:
        """Causal attention of each span's queries over its own keys, after :meth:`write`.

        Args:
            query: ``[heads, T, key_dim]``, heads a multiple of the cache's.

        Returns:
            ``[T, heads, value_dim]`` in the query's dtype.
        """


_BACKENDS: dict[str, str] = {"sdpa": "fastgen.attention.sdpa:SdpaBackend"}


def make_backend(name: str) -> AttentionBackend:
    """The backend ``name``, imported on first use; ``"auto"`` is the best that works here."""
    module, _, attribute = _BACKENDS["sdpa" if name == "auto" else name].partition(":")
    factory: Callable[[], AttentionBackend] = getattr(import_module(module), attribute)
    return factory()
