"""Calls on models whose attention cannot be packed: transformers' own loop, over the paged cache."""

from __future__ import annotations

from typing import Any

from fastgen.cache.batch import PaddedBatch, PagedLayer, RecordingLayer, check_pageable
from fastgen.cache.pool import LayerSpec, PoolOwner
from fastgen.calls import Call, run_original
from fastgen.exact import NotExact


class PaddedEngine(PoolOwner):
    """Runs one padded batch a call; what transformers computes, it computes, but for where the cache lies."""

    def run_call(self, model: Any, call: Call) -> Any:
        """Run ``call`` to its end.

        Raises:
            NotExact: its cache is of another kind, or larger than what is left of the pool; nothing has run.
        """
        check_pageable(call.cache)
        max_length = call.stopping_criteria.max_length
        if max_length is None or call.input_ids.numel() == 0:
            raise NotExact("no maximum length, or a prompt without tokens")
        max_length = max(max_length, call.input_ids.shape[1] + 1)
        pool = self.make_pool()
        batch = call.input_ids.shape[0]
        wanted = batch * pool.allocator.blocks_for(max_length - 1)
        with self.share(wanted, wanted) as share:
            if share is None:
                raise NotExact(
                    f"{wanted} cache blocks for its rows; the pool has {pool.allocator.total}, "
                    f"{pool.allocator.unshared} of them not in use by other calls"
                )
            rows = PaddedBatch(pool, share, batch, max_length - 1)
            layers = call.cache.layers
            try:
                for cache in pool.layers:
                    layers[cache.spec.layer_idx] = PagedLayer(rows, cache)
                output = run_original(model, call)
                for index, layer in enumerate(layers):
                    if isinstance(layer, PagedLayer):
                        layers[index] = layer.settled()
                return output
            finally:
                rows.release()
                self.counters["calls_padded"] += 1


def record_layers(model: Any, call: Call) -> list[LayerSpec]:
    """What each layer of the call's cache holds, learnt by running it.

    Raises:
        NotExact: its cache is of another kind, or the model does not use it.
    """
    check_pageable(call.cache)
    layers = call.cache.layers
    layers[:] = [RecordingLayer(index) for index in range(len(layers))]
    run_original(model, call)
    specs = [layer.spec for layer in layers if layer.spec is not None]
    if not specs:
        raise NotExact("a model that does not use the cache it is given")
    return specs
