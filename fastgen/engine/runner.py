"""Runs one step: packs rows into a single forward of the model over the pool."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fastgen.attention.base import AttentionBackend, Span, StepLayout
from fastgen.attention.hook import AttentionSwitch, PagedStep, RecordingStep
from fastgen.cache.blocks import BlockAllocator
from fastgen.cache.pool import BlockPool, LayerSpec
from fastgen.engine.request import Row
from fastgen.linear.cpu import projections


class Runner:
    """Calls the model's own forward on packed tokens ``(1, T)``, without a cache object of transformers'."""

    def __init__(self, model: Any, backend: AttentionBackend) -> None:
        self.backend = backend
        self._model = model
        self._switch = AttentionSwitch(model)
        parameters = inspect.signature(model.forward).parameters
        self._accepts = {name for name in ("attention_mask", "use_cache", "logits_to_keep") if name in parameters}

    def run(self, pool: BlockPool, plan: list[tuple[Row, int]]) -> torch.Tensor:
        """Run ``plan`` and count its tokens as computed.

        Returns:
            Logits ``[n, vocabulary]`` of the rows that have no pending token left, in the plan's order.
        """
        layout = _layout(pool.allocator, plan)
        step = PagedStep(self.backend, pool.layers, layout)
        token_ids, position_ids, last = [], [], []
        offset = 0
        for row, tokens in plan:
            stop = row.computed + tokens
            token_ids += row.token_ids[row.computed : stop]
            position_ids += row.positions(row.computed, stop)
            offset += tokens
            if tokens == row.pending:
                last.append(offset - 1)
        logits = self._forward(step, token_ids, position_ids, last)
        if step.calls != len(pool.layers):
            raise RuntimeError(
                f"fastgen: {step.calls} attention calls in a forward of {len(pool.layers)} cached layers"
            )
        for row, tokens in plan:
            row.computed += tokens
        return logits

    def record(self, token_ids: list[int]) -> list[LayerSpec]:
        """What each attention layer caches, learnt from a forward on one row.

        Raises:
            UnsupportedAttention: a layer needs what the backends do not compute.
        """
        step = RecordingStep(len(token_ids))
        self._forward(step, token_ids, list(range(len(token_ids))), [len(token_ids) - 1])
        return step.specs

    def _forward(self, step: PagedStep, token_ids: list[int], position_ids: list[int], last: list[int]) -> torch.Tensor:
        device = self._model.device
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([token_ids], device=device),
            "position_ids": torch.tensor([position_ids], device=device),
        }
        keep = torch.tensor(last, dtype=torch.long, device=device)
        if "attention_mask" in self._accepts:
            # Without a mask, transformers would look for packed sequences in the positions.
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "use_cache" in self._accepts:
            inputs["use_cache"] = False
        if "logits_to_keep" in self._accepts:
            inputs["logits_to_keep"] = keep
        with self._switch.running(step), projections(self._model.dtype, device, len(token_ids)):
            logits = self._model(**inputs, return_dict=True).logits[0]
        if "logits_to_keep" in self._accepts:
            return logits
        return logits[keep.to(logits.device)]


def _layout(allocator: BlockAllocator, plan: list[tuple[Row, int]]) -> StepLayout:
    block_size = allocator.block_size
    spans: list[Span] = []
    slots: list[int] = []
    offset = 0
    for row, tokens in plan:
        blocks, start, stop = row.table.blocks, row.computed, row.computed + tokens
        if row.table.contiguous:
            first = blocks[0] * block_size
            slots += range(first + start, first + stop)
            spans.append(Span(offset, tokens, stop, first, room=allocator.room(row.table) * block_size))
        else:
            slots += [blocks[i // block_size] * block_size + i % block_size for i in range(start, stop)]
            spans.append(Span(offset, tokens, stop, blocks=torch.tensor(blocks)))
        offset += tokens
    return StepLayout(spans, torch.tensor(slots), block_size)
