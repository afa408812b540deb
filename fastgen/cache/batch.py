"""The paged cache behind a transformers cache object, for models whose attention cannot be packed.

Such a model runs its own forward on its own padded batch; only where keys and values lie is ours. Nothing is
concatenated as the batch grows, and what is read is a view of the pool as long as the rows lie side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from fastgen.cache.blocks import BlockTable, Share
from fastgen.cache.pool import BlockPool, LayerCache, LayerSpec, slots_of
from fastgen.exact import NotExact


class PaddedBatch:
    """The block tables of a padded batch: rows of one length, pads included."""

    def __init__(self, pool: BlockPool, share: Share, batch: int, max_length: int) -> None:
        self._share = share
        self._block_size = pool.allocator.block_size
        self._max_length = max_length
        self._tables = [BlockTable() for _ in range(batch)]
        self._length = 0
        self._slots = torch.empty(batch, 0, dtype=torch.long)
        self._stride: int | None = None

    def update(self, cache: LayerCache, start: int, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Store ``[batch, kv_heads, n, dim]`` behind the first ``start`` tokens; returns all keys and all values."""
        stop = start + keys.shape[2]
        if stop > self._length:
            self._grow(stop)
        written = self._slots[:, start:stop].flatten().to(keys.device)
        read = []
        for pool, states in ((cache.keys, keys), (cache.values, values)):
            pool.index_copy_(1, written, states.transpose(0, 1).flatten(1, 2))
            read.append(self._read(pool, stop))
        return read

    def release(self) -> None:
        for table in self._tables:
            self._share.release(table)

    def _grow(self, length: int) -> None:
        for table in self._tables:
            self._share.reserve(table, length, expected=self._max_length)
        self._length = length
        self._slots = torch.stack([slots_of(table.blocks, self._block_size) for table in self._tables])
        steps = {b.blocks[0] - a.blocks[0] for a, b in zip(self._tables, self._tables[1:], strict=False)} or {0}
        regular = len(steps) == 1 and min(steps) >= 0 and all(table.contiguous for table in self._tables)
        self._stride = steps.pop() * self._block_size if regular else None

    def _read(self, pool: torch.Tensor, length: int) -> torch.Tensor:
        kv_heads, slots, dim = pool.shape
        batch = len(self._tables)
        if self._stride is not None:
            first = self._tables[0].blocks[0] * self._block_size
            return pool.as_strided(
                (batch, kv_heads, length, dim), (self._stride * dim, slots * dim, dim, 1), first * dim
            )
        chosen = self._slots[:, :length].flatten().to(pool.device)
        return pool.index_select(1, chosen).view(kv_heads, batch, length, dim).transpose(0, 1)


class PagedLayer(DynamicLayer):
    """A layer of a transformers cache whose states lie in the pool."""

    def __init__(self, rows: PaddedBatch, cache: LayerCache) -> None:
        super().__init__()
        self._rows = rows
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._rows.update(self._cache, start, key_states, value_states)
        return self.keys, self.values

    def settled(self) -> DynamicLayer:
        """A stock layer with a copy of the states, which outlives the call."""
        layer = DynamicLayer()
        if self.is_initialized:
            layer.update(self.keys.clone(), self.values.clone())
        return layer


class RecordingLayer(DynamicLayer):
    """A stock layer that notes what it caches."""

    spec: LayerSpec | None = None

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.spec = LayerSpec(
            kv_heads=key_states.shape[1],
            key_dim=key_states.shape[-1],
            value_dim=value_states.shape[-1],
            dtype=key_states.dtype,
            device=key_states.device,
            layer_idx=self._index,
        )
        return super().update(key_states, value_states, *args, **kwargs)


def check_pageable(cache: Any) -> None:
    """Raise :class:`NotExact` unless ``cache`` is an empty stock cache of layers that see everything."""
    if type(cache) is not DynamicCache or not cache.layers or cache.get_seq_length():
        raise NotExact("no plain transformers cache")
    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise NotExact(f"a cache with layers of type {type(layer).__name__}")
