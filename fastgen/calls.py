"""One call of transformers' ``generate`` after its preparation: into rows, and back to its return types.

This is the only module that knows the decoding loop's contract (processors, criteria, streamers, outputs).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput

from fastgen.cache.blocks import Share
from fastgen.cache.pool import BlockPool
from fastgen.engine.engine import Engine
from fastgen.engine.request import Group, Row
from fastgen.exact import NotExact
from fastgen.sampling import choose

CACHE_NAMES = ("cache", "past_key_values")
_KNOWN_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "tokenizer", *CACHE_NAMES}


@dataclass
class Call:
    """What transformers hands to its decoding loop."""

    input_ids: torch.Tensor
    """``[B, L]``, pads included."""
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_inputs: dict[str, Any]
    streamer: Any = None

    @property
    def has_eos(self) -> bool:
        return any(hasattr(criterion, "eos_token_id") for criterion in self.stopping_criteria)

    @property
    def cache(self) -> Any:
        """The empty cache that transformers prepared for this call, if any."""
        return next((self.model_inputs[name] for name in CACHE_NAMES if self.model_inputs.get(name) is not None), None)

    @property
    def stock_processors(self) -> bool:
        """Whether every processor is transformers' own, which look at each row by itself and keep no record."""
        return all(_is_stock(processor) for processor in self.logits_processor)

    def rows(self) -> list[Row]:
        """The call's rows without their left pads.

        Raises:
            NotExact: inputs that packing would not reproduce.
        """
        for name, value in self.model_inputs.items():
            if name not in _KNOWN_INPUTS and not _is_absent(value):
                raise NotExact(f"the model input {name!r}")
        if self.input_ids.ndim != 2 or self.input_ids.numel() == 0:
            raise NotExact("a prompt without tokens")
        if self.input_ids.dtype not in (torch.int32, torch.int64):
            raise NotExact(f"input ids of type {self.input_ids.dtype}")
        max_length = self.stopping_criteria.max_length
        if max_length is None:
            raise NotExact("no maximum length")
        starts = self._starts()
        positions = self._positions(starts)
        length = self.input_ids.shape[1]
        return [
            Row(ids[start:], max(max_length, length + 1) - start, None if position is None else position[start:])
            for ids, start, position in zip(self.input_ids.tolist(), starts, positions, strict=True)
            if start < length
        ]

    def _starts(self) -> list[int]:
        """Index of each row's first token that is not a pad."""
        mask = self.model_inputs.get("attention_mask")
        if mask is None:
            return [0] * self.input_ids.shape[0]
        if mask.shape != self.input_ids.shape:
            raise NotExact(f"an attention mask of shape {tuple(mask.shape)} for inputs {tuple(self.input_ids.shape)}")
        attended = mask != 0
        if not bool((mask.to(torch.long) == attended).all()):
            raise NotExact("an attention mask with values other than 0 and 1")
        if not bool(attended[:, -1].all()) or bool((attended[:, 1:] < attended[:, :-1]).any()):
            raise NotExact("an attention mask with right padding or holes")
        return (~attended).sum(dim=1).tolist()

    def _positions(self, starts: list[int]) -> list[list[int] | None]:
        """Each row's position ids, ``None`` where they just count from 0."""
        given = self.model_inputs.get("position_ids")
        batch, length = self.input_ids.shape
        if given is None:
            if any(starts):
                raise NotExact("left padding on a model that takes no position ids")
            return [None] * batch
        if given.ndim != 2 or given.shape[1] != length or given.shape[0] not in (1, batch):
            raise NotExact(f"position ids of shape {tuple(given.shape)}")
        rows = given.expand(batch, length).tolist()
        return [
            None if row[start:] == list(range(length - start)) else row for row, start in zip(rows, starts, strict=True)
        ]


def decoding_loop(run: Callable[[Any, Call], Any], streamer: Any = None) -> Callable[..., Any]:
    """``run(model, call)`` in the form that ``generate(custom_generate=...)`` takes.

    Args:
        streamer: goes into the call; transformers does not pass it on to a loop that is not its own.
    """

    def loop(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        return run(
            model, Call(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer)
        )

    return loop


class LockstepGroup(Group):
    """All rows of one call, in step: processors, criteria and sampling see them together, as in transformers."""

    def __init__(self, call: Call, rows: list[Row], generator: torch.Generator | None = None) -> None:
        config = call.generation_config
        self.rows = rows
        self.input_ids = call.input_ids
        self.streamer = call.streamer
        self._call = call
        self._generator = generator
        self._has_eos = call.has_eos
        self._unfinished = torch.ones(len(rows), dtype=torch.long, device=self.input_ids.device)
        returns = bool(config.return_dict_in_generate)
        self.scores: tuple[torch.Tensor, ...] | None = () if returns and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if returns and config.output_logits else None
        # Ended rows go on where something could see what they compute: outputs, a processor of the user's, or, with
        # no end-of-sequence token, the tokens that they go on to emit.
        self._drops_ended = self._has_eos and not returns and call.stock_processors
        self._ends: list[int | None] = [None] * len(rows)

    def advance(self, logits: torch.Tensor) -> None:
        logits = logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        running = [i for i, row in enumerate(self.rows) if not row.finished]
        if len(running) < len(self.rows):
            every = logits.new_zeros(len(self.rows), logits.shape[1])
            logits = every.index_copy_(0, torch.tensor(running, device=logits.device), logits)
        scores = self._call.logits_processor(self.input_ids, logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        tokens = choose(scores, bool(self._call.generation_config.do_sample), self._generator)
        if self._has_eos:
            pad = self._call.generation_config._pad_token_tensor.to(tokens.device)
            tokens = tokens * self._unfinished + pad * (1 - self._unfinished)
        self.input_ids = torch.cat([self.input_ids, tokens[:, None]], dim=-1)
        self._unfinished = self._unfinished & ~self._call.stopping_criteria(self.input_ids, self.scores)
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        self._extend(tokens.tolist(), self._unfinished.tolist())

    def _extend(self, tokens: list[int], unfinished: list[int]) -> None:
        done = not any(unfinished)
        for i, (row, token, goes_on) in enumerate(zip(self.rows, tokens, unfinished, strict=True)):
            if self._ends[i] is None and not goes_on:
                self._ends[i] = self.input_ids.shape[1]
            if not row.finished:
                row.token_ids.append(token)
                row.finished = done or (self._drops_ended and not goes_on)

    def generated(self) -> list[list[int]]:
        """Each row's ids up to where it ended, prompt and pads included."""
        return [ids[:end] for ids, end in zip(self.input_ids.tolist(), self._ends, strict=True)]

    def output(self, pool: BlockPool, recompute: Callable[[Call, torch.Tensor], None] | None) -> Any:
        """What ``generate`` returns for this call; to be taken before the rows' blocks are freed.

        Args:
            recompute: fills the cache to be returned, where the pool holds something else than the cache would.
        """
        if not self._call.generation_config.return_dict_in_generate:
            return self.input_ids
        cache = self._call.cache
        if recompute is not None:
            recompute(self._call, self.input_ids[:, :-1])
        else:
            _fill(cache, pool, self.rows, self.input_ids.shape[1] - 1)
        name = next(field.name for field in fields(GenerateDecoderOnlyOutput) if field.name in CACHE_NAMES)
        return GenerateDecoderOnlyOutput(
            sequences=self.input_ids, scores=self.scores, logits=self.logits, **{name: cache}
        )


def run_original(model: Any, call: Call) -> Any:
    """Transformers' own loop on a prepared call."""
    mode = call.generation_config.get_generation_mode()
    loop = getattr(type(model), GENERATION_MODES_MAPPING[mode])
    return loop(
        model,
        call.input_ids,
        logits_processor=call.logits_processor,
        stopping_criteria=call.stopping_criteria,
        generation_config=call.generation_config,
        streamer=call.streamer,
        **call.model_inputs,
    )


def returned_cache(output: Any) -> Any:
    """The cache in what ``generate`` returned, under whichever name."""
    return next((cache for name in CACHE_NAMES if (cache := getattr(output, name, None)) is not None), None)


def run_call(model: Any, call: Call, engine: Engine, fills_cache: bool) -> Any:
    """Run one call on the paged path.

    Args:
        fills_cache: whether a cache to be returned can be made from the pool; else one more forward makes it.

    Raises:
        NotExact: it cannot be done exactly; nothing has run, and the original loop may take the call over.
    """
    rows = call.rows()
    config = call.generation_config
    if config.return_dict_in_generate and call.cache is None:
        raise NotExact("a returned output without a cache")
    allocator = engine.make_pool().allocator
    sizes = [allocator.blocks_for(row.max_cached) for row in rows]
    wanted, largest = sum(sizes), max(sizes)
    waves = not config.return_dict_in_generate and _is_independent(call)
    with engine.share(wanted, largest if waves else wanted) as share:
        if share is None:
            raise NotExact(
                f"{wanted} cache blocks for its rows, {largest} for the largest; the pool has {allocator.total}, "
                f"{allocator.unshared} of them not in use by other calls"
            )
        if share.total < wanted and waves:
            return _run_waves(engine, share, call, rows)
        group = LockstepGroup(call, rows)
        recompute = None if fills_cache else functools.partial(_recompute, model)
        return _run_lockstep(engine, share, group, lambda: group.output(engine.make_pool(), recompute))


def _run_lockstep(engine: Engine, share: Share, group: LockstepGroup, output: Callable[[], Any]) -> Any:
    outputs: list[Any] = []
    try:
        engine.run([group], share, lambda _: outputs.append(output()))
    except BaseException:
        # Transformers leaves a streamer's consumer waiting when its loop raises; we let it go.
        with suppress(Exception):
            if group.streamer is not None:
                group.streamer.end()
        raise
    if group.streamer is not None:
        group.streamer.end()
    return outputs[0]


def _run_waves(engine: Engine, share: Share, call: Call, rows: list[Row]) -> torch.Tensor:
    """The rows one by one as blocks allow, and their results as one padded batch."""
    groups = [LockstepGroup(replace(call, input_ids=call.input_ids[i : i + 1]), [row]) for i, row in enumerate(rows)]
    engine.run(groups, share)
    length = max(group.input_ids.shape[1] for group in groups)
    pad_token = call.generation_config._pad_token_tensor
    pad = 0 if pad_token is None else int(pad_token)
    return torch.cat(
        [
            torch.nn.functional.pad(group.input_ids, (0, length - group.input_ids.shape[1]), value=pad)
            for group in groups
        ]
    )


def _is_independent(call: Call) -> bool:
    """Whether each of the call's rows, alone in a batch, would give what it gives in this one."""
    if call.input_ids.shape[0] == 1 or call.streamer is not None or call.generation_config.do_sample:
        return False
    if not all(map(_is_rowwise, call.logits_processor)):
        return False
    if not all(type(criterion).__name__ in _ROWWISE_CRITERIA for criterion in call.stopping_criteria):
        return False
    return call.has_eos or len(call.stopping_criteria) == 1


def _fill(cache: Any, pool: BlockPool, rows: Sequence[Row], length: int) -> None:
    """Put what the pool holds for ``rows`` into a transformers cache, left-padded with zeros to ``length``."""
    for layer in pool.layers:
        spec = layer.spec
        if spec.layer_idx is None:
            continue
        keys = layer.keys.new_zeros(len(rows), spec.kv_heads, length, spec.key_dim)
        values = layer.values.new_zeros(len(rows), spec.kv_heads, length, spec.value_dim)
        for i, row in enumerate(rows):
            pad = length - row.computed
            keys[i, :, pad:], values[i, :, pad:] = pool.states(layer, row.table, row.computed)
        cache.update(keys, values, spec.layer_idx)


def _recompute(model: Any, call: Call, input_ids: torch.Tensor) -> None:
    """Fill the call's cache by one of the model's own forwards over ``input_ids``, all tokens but the last."""
    new = input_ids.shape[1] - call.input_ids.shape[1]
    inputs = dict(call.model_inputs)
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None:
        inputs["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), new)], dim=-1)
    if positions is not None:
        following = positions[..., -1:] + torch.arange(1, new + 1, device=positions.device)
        inputs["position_ids"] = torch.cat([positions, following], dim=-1)
    model(**model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **inputs), return_dict=True)


def _is_absent(value: Any) -> bool:
    """Whether a model input says nothing: transformers passes some on as empty containers."""
    return value is None or value is False or (isinstance(value, dict) and all(map(_is_absent, value.values())))


def _is_rowwise(processor: Any) -> bool:
    """Whether a processor treats a row the same whatever batch it is in."""
    # A length to ignore is given for every row of the batch.
    ignores = getattr(processor, "prompt_ignore_length", None) is not None
    return type(processor).__name__ in _ROWWISE_PROCESSORS and not ignores


def _is_stock(processor: Any) -> bool:
    return type(processor).__module__.startswith("transformers.")


_ROWWISE_PROCESSORS = {
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "LogitNormalization",
}
_ROWWISE_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria"}
