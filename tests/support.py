"""What the tests share: tiny models, prompts, a tokenizer, and the comparison with un-patched `generate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

import fastgen

VOCAB = 200
PAD, BOS = 0, 1
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""What this version of transformers calls a forward's cache."""

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
}

Call = dict[str, Any] | Callable[[], dict[str, Any]]


def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model whose continuations vary; the same for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **(SHAPE | changes))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS)
    return model.eval()


def tiny_llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return tiny_model("llama", seed, **changes)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def left_pad(rows: list[list[int]], pad: int = PAD) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of a left-padded batch."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def batch(*lengths: int, seed: int = 0, pad: int = PAD) -> dict[str, torch.Tensor]:
    return left_pad(prompts(*lengths, seed=seed), pad)


def stock(model: PreTrainedModel) -> Callable[..., Any]:
    """The un-patched `generate` of a model, patched or not."""
    return MethodType(type(model).generate, model)


def continuation(model: PreTrainedModel, call: dict[str, Any], seed: int = 0) -> torch.Tensor:
    """The tokens that un-patched `generate` adds."""
    torch.manual_seed(seed)
    sequences = stock(model)(**call)
    return sequences[:, call["input_ids"].shape[1] :]


def unique_token(tokens: torch.Tensor, row: int, earliest: int) -> int:
    """A token that `row` emits first at step `earliest` or soon after, and that no other row emits."""
    others = set(torch.cat([tokens[:row], tokens[row + 1 :]]).flatten().tolist())
    own = tokens[row].tolist()
    for step in range(earliest, len(own)):
        if own[step] not in others and own[step] not in own[:step]:
            return own[step]
    raise AssertionError(f"row {row} emits no token of its own from step {earliest} on: {tokens.tolist()}")


def assert_pool_whole(model: PreTrainedModel) -> None:
    status = fastgen.status(model)
    assert status.blocks_free + status.blocks_cached == status.blocks_total


def assert_path(model: PreTrainedModel, path: str | None) -> None:
    last = fastgen.status(model).last_call
    assert last is not None
    if path is not None:
        assert last.path == path, f"took the {last.path} path: {last.reason}"
    assert isinstance(last.reason, str)
    assert last.reason or last.path == "paged"


def assert_same(
    model: PreTrainedModel,
    call: Call,
    *,
    path: str | None = "paged",
    dict_path: str | None = "as plain",
    seed: int = 0,
    distinct: int = 5,
    atol: float = 5e-4,
) -> torch.Tensor:
    """Compare patched with un-patched `generate`: ids alone first, then with scores and logits returned.

    Args:
        call: the arguments, or a function that makes them anew where they keep state.
        path: where the call must run (`None`: anywhere); `dict_path` is the same for the one that returns logits.
        distinct: how many distinct tokens each row must have for the comparison to mean something.

    Returns:
        The sequences.
    """
    make = call if callable(call) else lambda: dict(call)
    expected = _run(stock(model), make(), seed)
    actual = _run(model.generate, make(), seed)
    assert_path(model, path)
    assert_pool_whole(model)
    _assert_close(expected, actual, atol)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = _run(stock(model), wanted | make(), seed)
    actual = _run(model.generate, wanted | make(), seed)
    assert_path(model, path if dict_path == "as plain" else dict_path)
    assert_pool_whole(model)
    _assert_close(expected, actual, atol)
    sequences = expected[0].sequences
    generated = sequences[:, sequences.shape[1] - len(expected[0].logits) :]
    assert all(len(set(row.tolist())) >= distinct for row in generated), "too few distinct tokens to tell"
    return sequences


def assert_same_error(model: PreTrainedModel, call: Call) -> Exception:
    """Both must raise, and the same; returns what they raise."""
    make = call if callable(call) else lambda: dict(call)
    raised: list[Exception] = []
    for generate in (stock(model), model.generate):
        try:
            generate(**make())
        except Exception as error:
            raised.append(error)
    assert len(raised) == 2, f"only {len(raised)} of both raised: {raised}"
    assert type(raised[0]) is type(raised[1])
    assert str(raised[0]) == str(raised[1])
    assert_pool_whole(model)
    return raised[1]


def _run(generate: Callable[..., Any], call: dict[str, Any], seed: int) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(seed)
    return generate(**call), torch.get_rng_state()


def _assert_close(expected: tuple[Any, torch.Tensor], actual: tuple[Any, torch.Tensor], atol: float) -> None:
    assert torch.equal(expected[1], actual[1]), "the random stream is elsewhere after the call"
    assert_outputs_close(expected[0], actual[0], atol)


def assert_outputs_close(expected: Any, actual: Any, atol: float = 5e-4) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert actual.device == expected.device
        if expected.is_floating_point():
            torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-4)
        else:
            assert actual.dtype == expected.dtype
            assert actual.tolist() == expected.tolist()
    elif isinstance(expected, ModelOutput):
        assert list(actual.keys()) == list(expected.keys())
        for key in expected:
            assert_outputs_close(expected[key], actual[key], atol)
    elif isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for one, other in zip(expected, actual, strict=True):
            assert_outputs_close(one, other, atol)
    elif hasattr(expected, "layers"):
        caches = ([getattr(layer, "keys", None) for layer in cache.layers] for cache in (expected, actual))
        shapes = [[None if keys is None else keys.shape for keys in cache] for cache in caches]
        assert shapes[0] == shapes[1]


class Recorder(LogitsProcessor):
    """Keeps what it is shown; changes nothing, unless asked to damp one token in place."""

    def __init__(self, damped: int | None = None) -> None:
        self.log: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.damped = damped

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.log.append((input_ids.clone(), scores.clone()))
        if self.damped is not None:
            scores[:, self.damped] -= 3.0
        return scores


class StopRows(StoppingCriteria):
    """Stops row i at `lengths[i]` tokens, prompt included; keeps what it is shown."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.log: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.log.append(input_ids.clone())
        return input_ids.shape[1] >= self.lengths


class RecordingStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.log: list[list[Any] | str] = []

    def put(self, value: torch.Tensor) -> None:
        self.log.append(value.tolist())

    def end(self) -> None:
        self.log.append("end")


class Raising(LogitsProcessor):
    """Fails at its `step`-th call."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.step -= 1
        if self.step == 0:
            raise RuntimeError("a processor of the user's fails")
        return scores


def assert_same_logs(recorders: list[Any]) -> None:
    """Recorders in the order `assert_same` made them: stock, patched, stock, patched."""
    assert len(recorders) == 4
    for expected, actual in (recorders[:2], recorders[2:]):
        assert len(expected.log) > 0
        assert_outputs_close(tuple(expected.log), tuple(actual.log))


_TEXT = """the quick brown fox jumps over the lazy dog while seven small ships sail past the old harbour wall
a baker sells warm bread and sweet rolls from early morning until the evening bells begin to ring again
never trust a quiet river after heavy rain, said the ferryman; take the long bridge instead, and walk slowly
every good question deserves a clear answer: what, when, where, why and how? write them down before you start"""

_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}; {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A trained BPE of at most `VOCAB` tokens for lower-case text, with a chat template and left padding."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<extra>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_TEXT.splitlines() * 2, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _TEMPLATE
    return fast
