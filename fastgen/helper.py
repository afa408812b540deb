"""``fastgen.generate``: any number of prompts of any lengths, batched as they come and go."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import EosTokenCriteria, MaxLengthCriteria

from fastgen.calls import Call, LockstepGroup, decoding_loop
from fastgen.engine.engine import Engine
from fastgen.engine.request import Group, Row
from fastgen.engine.scheduler import DoesNotFit
from fastgen.exact import NotExact
from fastgen.patching import PatchedGenerate, base_model, find, patch, unpatch

Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | torch.Tensor

_NESTING = {
    "eos_token_id": 1,
    "stop_strings": 1,
    "suppress_tokens": 1,
    "begin_suppress_tokens": 1,
    "logits_processor": 1,
    "stopping_criteria": 1,
    "forced_eos_token_id": 1,
    "exponential_decay_length_penalty": 1,
    "bad_words_ids": 2,
    "sequence_bias": 3,
}
"""Arguments that are lists by nature, and how deep: one value a prompt is a list of these."""


@dataclass(frozen=True)
class Result:
    """What one prompt was continued with."""

    token_ids: list[int]
    """Generated tokens only, the end-of-sequence token included."""
    finish_reason: str
    """``"eos"``, ``"length"``, ``"stop"`` (a stop string) or ``"criteria"`` (a stopping criterion of yours)."""
    text: str | None
    """``None`` without a tokenizer."""


class GreedyGroup(Group):
    """One prompt, greedy, with nothing that looks at scores: a token is accepted without touching a tensor."""

    greedy = True

    def __init__(self, row: Row, eos: frozenset[int]) -> None:
        self.row = row
        self.rows = (row,)
        self._eos = eos

    def advance(self, logits: torch.Tensor) -> None:
        self.accept(logits.argmax(-1).tolist())

    def accept(self, tokens: list[int]) -> None:
        row = self.row
        row.token_ids.append(tokens[0])
        row.finished = tokens[0] in self._eos or len(row.token_ids) >= row.max_tokens


def generate(
    model: Any,
    prompts: Prompt | Sequence[Prompt],
    tokenizer: Any = None,
    *,
    progress: bool | None = None,
    seed: int | None = None,
    **generation_arguments: Any,
) -> list[Result]:
    """Continue ``prompts``, each as ``model.generate`` would continue it alone.

    Args:
        model: a transformers model, patched or not, or the name of one. One that is not patched is patched for this
            call only; patch it yourself to keep its pool between calls.
        prompts: strings, token ids or chats, also mixed; or a single one.
        tokenizer: needed for strings, chats and for the results' text; loaded with the model when that is a name.
        progress: show a progress bar; by default for work of some seconds on a terminal or in a notebook.
        seed: prompt ``i`` is sampled as after ``torch.manual_seed(seed + i)``; without it, from torch's random state.
        generation_arguments: what ``model.generate`` takes; each may be a list with one value a prompt.

    Returns:
        The results in the order of the prompts; ``num_return_sequences`` of them for each.
    """
    if isinstance(model, str | os.PathLike):
        model, tokenizer = _load(model, tokenizer)
    listed = _listed(prompts)
    arguments = _per_prompt(generation_arguments, len(listed))
    with torch.no_grad(), _patched(model) as patched, _bar(progress, len(listed)) as bar:
        batch = _Batch(patched, tokenizer, seed, bar)
        return batch.run([_encode(prompt, tokenizer) for prompt in listed], arguments)


class _Batch:
    """The prompts of one helper call on their way through the engine."""

    def __init__(self, patched: PatchedGenerate, tokenizer: Any, seed: int | None, bar: Any) -> None:
        self._patched = patched
        self._tokenizer = tokenizer
        self._seed = seed
        self._bar = bar
        self._results: dict[int, list[Result]] = {}
        self._running: dict[Group, tuple[int, Call]] = {}

    def run(self, prompts: list[list[int]], arguments: list[dict[str, Any]]) -> list[Result]:
        self._prompts, self._arguments = prompts, arguments
        engine = self._patched.current_engine()
        if not isinstance(engine, Engine):
            for index in range(len(prompts)):
                self._run_alone(index)
        else:
            with engine.share(None, 1) as share:
                if share is None:
                    for index in range(len(prompts)):
                        self._run_alone(index)
                else:
                    engine.run(self._groups(), share, self._finish, self._misfit)
        return [result for index in range(len(prompts)) for result in self._results[index]]

    def _groups(self) -> Iterator[Group]:
        """A group for each prompt, prepared when the scheduler has room for it."""
        for index in range(len(self._prompts)):
            try:
                call = self._prepare(index)
                group = self._group(call, index)
            except NotExact:
                self._run_alone(index)
                continue
            self._running[group] = index, call
            yield group

    def _prepare(self, index: int) -> Call:
        """The call that transformers makes of this prompt alone."""
        arguments = self._inputs(index)
        captured: list[Call] = []

        _, arguments = self._patched.prepare((), arguments)
        if arguments.get("streamer") is not None:
            raise NotExact("a streamer")
        capture = decoding_loop(lambda _, call: captured.append(call))
        self._patched.original(custom_generate=capture, **arguments)
        call = captured[0]
        self._patched.check_call(call)
        call.generation_config.return_dict_in_generate = False
        return call

    def _group(self, call: Call, index: int) -> Group:
        rows = call.rows()
        kinds = [type(criterion) for criterion in call.stopping_criteria]
        plain = kinds in ([MaxLengthCriteria], [MaxLengthCriteria, EosTokenCriteria])
        if plain and len(rows) == 1 and not call.generation_config.do_sample and not call.logits_processor:
            return GreedyGroup(rows[0], _eos_of(call.stopping_criteria))
        generator = None
        if self._seed is not None:
            generator = torch.Generator(call.input_ids.device).manual_seed(self._seed + index)
        return LockstepGroup(call, rows, generator)

    def _finish(self, group: Group) -> None:
        index, call = self._running.pop(group)
        length = call.input_ids.shape[1]
        if isinstance(group, LockstepGroup):
            rows = [tokens[length:] for tokens in group.generated()]
        else:
            rows = [group.rows[0].token_ids[length:]]
        self._patched.note("paged", "packed")
        limit = call.stopping_criteria.max_length or sys.maxsize
        self._record(index, rows, _eos_of(call.stopping_criteria), limit - length)

    def _misfit(self, misfit: DoesNotFit) -> None:
        index, _ = self._running.pop(misfit.group)
        self._run_alone(index)

    def _run_alone(self, index: int) -> None:
        """The prompt as a call of its own, which says itself which path it takes and why."""
        arguments = self._inputs(index)
        length = arguments["inputs"].shape[1]
        model = self._patched.model
        taken = {key: value for key, value in self._arguments[index].items() if key != "generation_config"}
        config, _ = model._prepare_generation_config(arguments.get("generation_config"), **taken)
        with _seeded(self._seed, index):
            output = self._patched(**arguments)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        eos = _eos_ids(config.eos_token_id) | _eos_of(self._arguments[index].get("stopping_criteria") or ())
        rows = [_until(tokens[length:], eos, config.pad_token_id) for tokens in sequences.tolist()]
        limit = config.max_length or sys.maxsize
        self._record(index, rows, eos, limit - length if config.max_new_tokens is None else config.max_new_tokens)

    def _inputs(self, index: int) -> dict[str, Any]:
        device = self._patched.model.device
        inputs = torch.tensor([self._prompts[index]], dtype=torch.long, device=device)
        arguments = {"inputs": inputs, "attention_mask": torch.ones_like(inputs), **self._arguments[index]}
        config = arguments.get("generation_config")
        if arguments.get("stop_strings") or getattr(config, "stop_strings", None):
            arguments.setdefault("tokenizer", self._tokenizer)
        return arguments

    def _record(self, index: int, rows: list[list[int]], eos: frozenset[int], limit: int) -> None:
        """Results of rows of generated tokens, at most ``limit`` of them."""
        arguments = self._arguments[index]
        stop_strings = arguments.get("stop_strings") or getattr(
            arguments.get("generation_config"), "stop_strings", None
        )
        results = []
        for tokens in rows:
            if tokens and tokens[-1] in eos:
                reason = "eos"
            elif len(tokens) >= limit:
                reason = "length"
            else:
                reason = "stop" if stop_strings else "criteria"
            text = None if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=True)
            results.append(Result(tokens, reason, text))
        self._results[index] = results
        self._bar.update()


def _eos_of(criteria: Sequence[Any]) -> frozenset[int]:
    """The tokens that end a row by ``criteria``."""
    return frozenset().union(*(_eos_ids(getattr(criterion, "eos_token_id", None)) for criterion in criteria))


def _eos_ids(eos: Any) -> frozenset[int]:
    if isinstance(eos, torch.Tensor):
        eos = eos.flatten().tolist()
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def _until(tokens: list[int], eos: frozenset[int], pad: int | None) -> list[int]:
    """``tokens`` up to the first end-of-sequence token, or without the pads after another end."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), None)
    if end is None:
        end = len(tokens)
        while eos and end and tokens[end - 1] == pad:
            end -= 1
    return tokens[:end]


@contextmanager
def _seeded(seed: int | None, index: int) -> Iterator[None]:
    """Torch's random state as after ``manual_seed(seed + index)``, and then as it was."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed + index)
        yield


@contextmanager
def _patched(model: Any) -> Iterator[PatchedGenerate]:
    """The model's patch; one for now if it has none."""
    target = base_model(model)
    present = find(target)
    if present is not None:
        yield present
        return
    patch(target)
    try:
        yield target.generate
    finally:
        unpatch(target)


@contextmanager
def _bar(progress: bool | None, total: int) -> Iterator[Any]:
    """A progress bar over prompts; unless asked for, only for people and only when it takes a while."""
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    shown = watched and total > 1 if progress is None else progress
    delay = 2 if progress is None else 0
    with tqdm(total=total, disable=not shown, delay=delay, unit="prompt", desc="fastgen") as bar:
        yield bar


def _load(name: str | os.PathLike[str], tokenizer: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    return model, tokenizer or AutoTokenizer.from_pretrained(name)


def _listed(prompts: Any) -> list[Any]:
    """``prompts`` as a list of prompts, also where it is a single one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, torch.Tensor):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    listed = list(prompts)
    if listed and isinstance(listed[0], int | dict):
        return [listed]
    return listed


def _encode(prompt: Any, tokenizer: Any) -> list[int]:
    """Token ids of a prompt.

    Raises:
        TypeError: it is neither a string, nor token ids, nor a chat.
        ValueError: it needs a tokenizer and there is none.
    """
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.tolist()
    is_chat = isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)
    if isinstance(prompt, str) or is_chat:
        if tokenizer is None:
            raise ValueError("fastgen: a prompt that is text or a chat needs tokenizer=")
        if isinstance(prompt, str):
            return list(tokenizer(prompt).input_ids)
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    if isinstance(prompt, list | tuple) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    raise TypeError(f"fastgen: prompt {prompt!r:.80} is neither a string, nor token ids, nor a chat")


def _per_prompt(arguments: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The arguments of each prompt, lists with one value a prompt taken apart.

    Raises:
        ValueError: such a list has another length than the prompts.
    """
    taken = [dict[str, Any]() for _ in range(count)]
    for name, value in arguments.items():
        listed = isinstance(value, list) and _depth(value) > _NESTING.get(name, 0)
        if listed and len(value) != count:
            raise ValueError(f"fastgen: {name} has {len(value)} values for {count} prompts: {value!r:.80}")
        for index in range(count):
            taken[index][name] = value[index] if listed else value
    return taken


def _depth(value: Any) -> int:
    """Levels of lists in ``value``; an empty list, or one with lists and other things, counts by its deepest."""
    return 1 + max((_depth(item) for item in value), default=0) if isinstance(value, list) else 0
