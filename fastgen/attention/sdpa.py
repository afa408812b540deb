"""The reference backend: torch's scaled_dot_product_attention on views of the pool. Runs anywhere."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from fastgen.attention.base import AttentionBackend, Scoring, Span, StepLayout
from fastgen.cache.pool import LayerCache


class SdpaBackend(AttentionBackend):
    """Row by row, each over its own keys only: no mask ever spans two rows.

    A row with contiguous blocks is read in place; another is gathered first.
    """

    name = "sdpa"

    def attend(self, query: torch.Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring) -> torch.Tensor:
        if scoring.softcap is None and scoring.sinks is None:
            if all(span.length == 1 for span in layout.spans):
                return _decode(query, cache, layout, scoring)
            score = _sdpa
        else:
            score = _explicit
        heads, tokens = query.shape[:2]
        output = query.new_empty(tokens, heads, cache.spec.value_dim)
        for span in layout.spans:
            rows = slice(span.start, span.start + span.length)
            keys, values = _states(cache, layout, span, scoring)
            output[rows] = score(query[:, rows], keys, values, scoring).transpose(0, 1)
        return output


def _decode(query: torch.Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring) -> torch.Tensor:
    """One query a row: the heads of a group are the rows of one small matrix, and keys are read once a group."""
    heads, tokens, dim = query.shape
    kv_heads = cache.spec.kv_heads
    queries = query.transpose(0, 1).reshape(tokens, 1, kv_heads, heads // kv_heads, dim).unbind()
    attended = []
    for row, span in zip(queries, layout.spans, strict=True):
        keys, values = _states(cache, layout, span, scoring)
        attended.append(scaled_dot_product_attention(row, keys[None], values[None], scale=scoring.scale))
    return torch.cat(attended).view(tokens, heads, cache.spec.value_dim)


def _states(cache: LayerCache, layout: StepLayout, span: Span, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values that a row's queries may see, ``[kv_heads, n, dim]``."""
    # A decoding row never looks behind its window, so that part is not even read.
    first = max(0, span.context - span.length - scoring.window + 1) if scoring.window else 0
    return _row(cache.keys, span, first, layout.block_size), _row(cache.values, span, first, layout.block_size)


def _row(pool: torch.Tensor, span: Span, first: int, block_size: int) -> torch.Tensor:
    """Entries ``first`` to ``context`` of a row, ``[kv_heads, n, dim]``."""
    if span.first_slot is not None:
        return pool.narrow(1, span.first_slot + first, span.context - first)
    assert span.blocks is not None
    kv_heads, _, dim = pool.shape
    skipped = first // block_size
    blocks = pool.view(kv_heads, -1, block_size, dim).index_select(1, span.blocks[skipped:])
    return blocks.view(kv_heads, -1, dim)[:, first - skipped * block_size : span.context - skipped * block_size]


def _mask(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor | None:
    """``[queries, keys]``, True where seen, for queries that are the last of the keys; ``None`` when all is seen."""
    if queries == 1 and (not window or keys <= window):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen.triu(keys - queries - window + 1) if window else seen


def _sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    heads, length, dim = query.shape
    kv_heads, context, _ = keys.shape
    mask = None
    causal = length > 1 and length == context and not (scoring.window and scoring.window < context)
    if not causal:
        mask = _mask(length, context, scoring.window, query.device)
    if mask is None and not causal:
        query = query.reshape(kv_heads, heads // kv_heads, dim)
    attended = scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=causal,
        scale=scoring.scale,
        enable_gqa=query.shape[0] != kv_heads,
    )
    return attended.reshape(heads, length, values.shape[-1])


def _explicit(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Softcap and sinks, step by step as transformers' eager attention has them (softmax in float32)."""
    heads, length, dim = query.shape
    kv_heads, context, value_dim = values.shape
    grouped = query.reshape(kv_heads, -1, dim)
    scores = (grouped @ keys.transpose(1, 2)).view(heads, length, context) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    mask = _mask(length, context, scoring.window, query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(heads, 1, 1).expand(heads, length, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :context]
    return (weights.reshape(kv_heads, -1, context) @ values).view(heads, length, value_dim)
