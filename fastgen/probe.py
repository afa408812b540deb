"""Is the paged path exact on this model? First what its config says, then a comparison of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from fastgen.attention.hook import UnsupportedAttention
from fastgen.cache.pool import BlockPool, LayerSpec
from fastgen.engine.request import Row
from fastgen.engine.runner import Runner
from fastgen.exact import NotExact
from fastgen.options import Options

NEW_TOKENS = 4
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of logits, as a share of their spread, that counts as rounding."""

_STATE_BESIDE_ATTENTION = ("linear", "mamba", "conv", "recurrent", "ssm", "rwkv", "chunked")


def check_model(model: Any) -> None:
    """Refuse what the model itself says.

    Raises:
        NotExact: with the reason.
    """
    config = model.config
    if config.is_encoder_decoder:
        raise NotExact("an encoder-decoder model")
    if getattr(model, "_is_stateful", False):
        raise NotExact("a model with a recurrent state")
    for kind in sorted(set(getattr(config.get_text_config(), "layer_types", None) or [])):
        if any(word in kind for word in _STATE_BESIDE_ATTENTION):
            raise NotExact(f"layers of type {kind!r}")


def exact_length(config: PreTrainedConfig) -> int | None:
    """Longest sequence for which packing is exact; ``None`` for any.

    Dynamic and long rope choose their frequencies by the longest row of a padded batch, and keep what was cached
    before the switch as it was.
    """
    limits = [
        parameters.get("original_max_position_embeddings") or config.get_text_config().max_position_embeddings
        for parameters in _rope_parameters(getattr(config.get_text_config(), "rope_parameters", None))
        if parameters.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def _rope_parameters(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "rope_type" in value:
            yield value
        else:
            for nested in value.values():
                yield from _rope_parameters(nested)


def probe(model: Any, runner: Runner, original: Callable[..., Any], options: Options) -> tuple[list[LayerSpec], str]:
    """Learn the layers' caches, and compare both paths on two ragged prompts.

    Returns:
        The layers' specs, and a sentence on what was compared.

    Raises:
        NotExact: the paths differ, or one of them fails.
    """
    with torch.no_grad(), _plain(model):
        specs = _record(model, runner)
        if not options.verify:
            return specs, "not verified, as asked"
        return specs, _compare(model, runner, original, specs)


def _record(model: Any, runner: Runner) -> list[LayerSpec]:
    try:
        specs = runner.record(_tokens(model, 5, 0))
    except UnsupportedAttention as error:
        raise NotExact(str(error)) from error
    except Exception as error:
        raise NotExact(f"its forward does not run packed ({_line(error)})") from error
    if not specs:
        raise NotExact("its layers do not use transformers' attention interface")
    return specs


def _compare(model: Any, runner: Runner, original: Callable[..., Any], specs: list[LayerSpec]) -> str:
    # Past the shortest window where that is short, so that windows are compared too.
    window = min((spec.window for spec in specs if 0 < spec.window <= 64), default=4)
    prompts = [_tokens(model, window + 13, 1), _tokens(model, 5, 2)]
    longest = max(map(len, prompts))
    device = model.device
    input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    try:
        expected = original(input_ids, attention_mask=mask, generation_config=config)
    except Exception as error:
        raise NotExact(f"the original generate fails on the probe ({_line(error)})") from error
    forced = expected.sequences[:, longest:].tolist()
    try:
        steps = _forced_logits(runner, specs, prompts, forced)
        worst = max(
            _difference(want, got.to(want.device)) for want, got in zip(expected.logits, steps, strict=True)
        )
    except Exception as error:
        raise NotExact(f"its forward does not run packed ({_line(error)})") from error
    tolerance = TOLERANCE.get(model.dtype, 5e-2)
    if not worst <= tolerance:
        raise NotExact(f"logits differ from the original's by {worst:.1e} of their spread, more than {tolerance:.0e}")
    return f"logits within {worst:.1e} of the original's on the probe"


def _forced_logits(
    runner: Runner, specs: list[LayerSpec], prompts: list[list[int]], forced: list[list[int]]
) -> Iterator[torch.Tensor]:
    """Logits ``[2, vocabulary]`` before each of the ``forced`` tokens, from a small pool of the probe's own."""
    longest = max(map(len, prompts)) + len(forced[0])
    options = Options(block_size=4, num_blocks=2 * (longest // 4 + 1))
    pool = BlockPool(specs, options)
    rows = [Row(list(prompt), longest) for prompt in prompts]
    for step in range(len(forced[0])):
        for row in rows:
            pool.allocator.reserve(row.table, len(row.token_ids))
        yield runner.run(pool, [(row, row.pending) for row in rows])
        for row, tokens in zip(rows, forced, strict=True):
            row.token_ids.append(tokens[step])


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Largest difference as a share of the spread of the expected logits; NaN never passes."""
    expected, actual = expected.double(), actual.double()
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()) or not finite.any():
        return float("inf")
    expected, actual = expected[finite], actual[finite]
    return float((expected - actual).abs().max() / expected.std().clamp_min(1e-6))


def _tokens(model: Any, length: int, seed: int) -> list[int]:
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(5, vocabulary - 1), vocabulary, (length,), generator=generator).tolist()


def _line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 160 else text[:157] + "..."


@contextmanager
def _plain(model: Any) -> Iterator[None]:
    """Evaluation mode and default generation settings, all put back."""
    training = [module for module in model.modules() if module.training]
    generation_config = model.generation_config
    with torch.random.fork_rng(devices=[]):
        try:
            model.eval()
            model.generation_config = GenerationConfig()
            yield
        finally:
            model.generation_config = generation_config
            for module in training:
                module.training = True
