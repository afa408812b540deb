"""The reference backend: torch's scaled_dot_product_attention on views of the pool. Runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from fastgen.attention.base import AttentionBackend, Scoring, Span, StepLayout
from fastgen.cache.pool import LayerCache


class SdpaBackend(AttentionBackend):
    """Each row over its own keys: read in place where its blocks are contiguous, else gathered first.

    Decoding rows of like length are attended in pairs, as any two stretches of the pool are one strided tensor. That
    halves the calls and gives two threads an even number of heads: a third less time on a CPU. Larger groups, which
    would need rows at equal distances, gain little more.
    """

    name = "sdpa"

    def attend(self, query: torch.Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring) -> torch.Tensor:
        if scoring.softcap is not None or scoring.sinks is not None:
            return _row_by_row(layout.spans, query, cache, layout, scoring)
        decode: _Decode = layout.plan(
            (scoring.window, query.dtype), lambda: _Decode.of(layout, scoring.window, query.dtype)
        )
        if decode.order is None:
            return decode.attend(query, cache, scoring)
        output = _row_by_row(decode.others, query, cache, layout, scoring)
        if decode.calls:
            output[decode.order] = decode.attend(query[:, decode.order], cache, scoring)
        return output


@dataclass(frozen=True)
class _Keys:
    """The entries of a row that its queries may see: from ``first`` to the end of the context."""

    span: Span
    first: int

    @classmethod
    def of(cls, span: Span, window: int) -> _Keys:
        # A decoding row never looks behind its window, so that part is not even read.
        return cls(span, max(0, span.context - span.length - window + 1) if window else 0)

    def __len__(self) -> int:
        return self.span.context - self.first

    @property
    def slot(self) -> int:
        """Where they begin, for a row with contiguous blocks."""
        assert self.span.first_slot is not None
        return self.span.first_slot + self.first

    def pairs_with(self, longer: _Keys) -> bool:
        """Whether one call for both is worth it, and reads nothing but zeros behind this row's own entries."""
        if self.span.first_slot is None or longer.span.first_slot is None:
            return False
        return len(longer) <= 1.25 * len(self) + 32 and self.first + len(longer) <= self.span.room

    def read(self, pool: torch.Tensor, block_size: int) -> torch.Tensor:
        """``[kv_heads, len(self), dim]``."""
        if self.span.first_slot is not None:
            return pool.narrow(1, self.slot, len(self))
        assert self.span.blocks is not None
        kv_heads, _, dim = pool.shape
        skipped = self.first // block_size
        blocks = pool.view(kv_heads, -1, block_size, dim).index_select(1, self.span.blocks[skipped:])
        return blocks.view(kv_heads, -1, dim).narrow(1, self.first - skipped * block_size, len(self))


@dataclass(frozen=True)
class _Call:
    """One SDPA call for one or two decoding rows."""

    rows: list[_Keys]
    """In the order of their slots."""
    mask: torch.Tensor | None
    """``[2, 1, 1, n]``: minus infinity where the shorter row has no key any more."""

    def read(self, pool: torch.Tensor, block_size: int) -> torch.Tensor:
        """``[rows, kv_heads, n, dim]``."""
        first, last = self.rows[0], self.rows[-1]
        if first is last:
            return first.read(pool, block_size)[None]
        kv_heads, slots, dim = pool.shape
        size = (2, kv_heads, max(len(first), len(last)), dim)
        return pool.as_strided(size, ((last.slot - first.slot) * dim, slots * dim, dim, 1), first.slot * dim)


@dataclass(frozen=True)
class _Decode:
    """How the decoding rows of a step are attended: the heads of a group are the rows of one small matrix."""

    calls: list[_Call]
    order: torch.Tensor | None
    """``[n]``: the calls' queries among the packed tokens; ``None`` if they are these tokens as they lie."""
    others: list[Span]
    """The rows that do not decode."""
    block_size: int

    @classmethod
    def of(cls, layout: StepLayout, window: int, dtype: torch.dtype) -> _Decode:
        rows = [_Keys.of(span, window) for span in layout.spans if span.length == 1]
        device = layout.slots.device
        calls = [_Call(pair, _pair_mask(pair, dtype, device)) for pair in _pair_up(rows)]
        order = [keys.span.start for call in calls for keys in call.rows]
        as_they_lie = order == list(range(layout.slots.shape[0]))
        return cls(
            calls,
            None if as_they_lie else torch.tensor(order, dtype=torch.long, device=device),
            [span for span in layout.spans if span.length > 1],
            layout.block_size,
        )

    def attend(self, query: torch.Tensor, cache: LayerCache, scoring: Scoring) -> torch.Tensor:
        """``query`` ``[heads, rows, key_dim]`` in the order of the calls; returns ``[rows, heads, value_dim]``."""
        heads, rows, dim = query.shape
        grouped = query.transpose(0, 1).reshape(rows, cache.spec.kv_heads, -1, dim)
        attended = [
            scaled_dot_product_attention(
                queries,
                call.read(cache.keys, self.block_size),
                call.read(cache.values, self.block_size),
                attn_mask=call.mask,
                scale=scoring.scale,
            )
            for call, queries in zip(self.calls, grouped.split([len(call.rows) for call in self.calls]), strict=True)
        ]
        return torch.cat(attended).view(rows, heads, -1)


def _pair_up(rows: list[_Keys]) -> list[list[_Keys]]:
    """Rows in pairs of neighbours by length where that is possible and worth it, else alone."""
    pairs: list[list[_Keys]] = []
    alone: _Keys | None = None
    for keys in sorted(rows, key=len):
        if alone is None:
            alone = keys
        elif alone.pairs_with(keys):
            pairs.append(sorted((alone, keys), key=lambda row: row.slot))
            alone = None
        else:
            pairs.append([alone])
            alone = keys
    return pairs if alone is None else [*pairs, [alone]]


def _pair_mask(rows: list[_Keys], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    lengths = [len(keys) for keys in rows]
    if min(lengths) == max(lengths):
        return None
    mask = torch.zeros(len(rows), 1, 1, max(lengths), dtype=dtype, device=device)
    for row, length in zip(mask, lengths, strict=True):
        row[..., length:] = -torch.inf
    return mask


def _row_by_row(
    spans: list[Span], query: torch.Tensor, cache: LayerCache, layout: StepLayout, scoring: Scoring
) -> torch.Tensor:
    """The rows of ``spans``, a call each; the others' part of the output is left open."""
    score = _sdpa if scoring.softcap is None and scoring.sinks is None else _explicit
    heads, tokens = query.shape[:2]
    output = query.new_empty(tokens, heads, cache.spec.value_dim)
    for span in spans:
        rows = slice(span.start, span.start + span.length)
        keys = _Keys.of(span, scoring.window)
        states = keys.read(cache.keys, layout.block_size), keys.read(cache.values, layout.block_size)
        output[rows] = score(query[:, rows], *states, scoring).transpose(0, 1)
    return output


def _mask(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor | None:
    """``[queries, keys]``, True where seen, for queries that are the last of the keys; ``None`` when all is seen."""
    if queries == 1 and (not window or keys <= window):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen.triu(keys - queries - window + 1) if window else seen


def _sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    heads, length, _ = query.shape
    kv_heads, context, value_dim = values.shape
    causal = length == context and not (scoring.window and scoring.window < context)
    attended = scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=None if causal else _mask(length, context, scoring.window, query.device),
        is_causal=causal,
        scale=scoring.scale,
        enable_gqa=heads != kv_heads,
    )
    return attended.reshape(heads, length, value_dim)


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
