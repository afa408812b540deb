"""Is the paged path exact on this model? First what its config says, then a comparison of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from fastgen.attention.hook import UnsupportedAttention
from fastgen.cache.pool import BlockPool, LayerSpec, States
from fastgen.calls import Call, decoding_loop, returned_cache
from fastgen.engine.padded import PaddedEngine, record_layers
from fastgen.engine.request import Row
from fastgen.engine.runner import Runner
from fastgen.exact import NotExact
from fastgen.options import Options

Generate = Callable[..., Any]
NEW_TOKENS = 3
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of logits, as a share of their spread, that counts as rounding."""

_STATE_BESIDE_ATTENTION = ("linear", "mamba", "conv", "recurrent", "ssm", "rwkv", "chunked")


def check_model(model: Any) -> None:
    """Refuse what the model itself says.

    Raises:
        NotExact: with the reason.
    """
    config = model.config
    if model.device.type == "meta":
        raise NotExact("weights that are offloaded")
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


@dataclass(frozen=True)
class Finding:
    """What a probe learnt."""

    specs: list[LayerSpec]
    reason: str
    """What was compared, in a sentence."""
    fills_cache: bool = False
    """Whether a transformers cache made from the pool holds what the original's holds."""


def probe_packed(model: Any, runner: Runner, original: Generate, options: Options) -> Finding:
    """Learn the layers' caches, and compare packed forwards with the original on two ragged prompts.

    Raises:
        NotExact: the paths differ, or one of them fails.
    """
    with _plain(model):
        specs = _record(model, runner)
        if not options.verify:
            return Finding(specs, "not verified, as asked")
        inputs, expected = _expected(model, original, specs)
        _check_windows(specs, returned_cache(expected))
        try:
            steps, states = _forced(runner, specs, inputs, expected)
            reason = _compare(model, original, inputs, expected, steps)
            indexed = _with_layer_idx(specs, returned_cache(expected), states)
        except NotExact:
            raise
        except Exception as error:
            raise NotExact(f"its forward does not run packed ({_line(error)})") from error
        return Finding(indexed or specs, reason, fills_cache=indexed is not None)


def probe_padded(model: Any, original: Generate, options: Options) -> tuple[PaddedEngine, str]:
    """The same for the model's own attention over the paged cache.

    Raises:
        NotExact: the paths differ, or one of them fails.
    """
    with _plain(model):
        try:
            specs: list[LayerSpec] = []

            def record(model: Any, call: Call) -> None:
                specs.extend(record_layers(model, call))

            def paged(model: Any, call: Call) -> Any:
                return PaddedEngine(specs, Options(block_size=4, num_blocks=64)).run_call(model, call)

            inputs, expected = _expected(model, original, [])
            original(**inputs, custom_generate=decoding_loop(record))
            actual = original(**inputs, custom_generate=decoding_loop(paged))
            reason = _compare(model, original, inputs, expected, actual.logits)
        except NotExact:
            raise
        except Exception as error:
            raise NotExact(f"its forward does not run over the paged cache ({_line(error)})") from error
        return PaddedEngine(specs, options), reason


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


def _expected(model: Any, original: Generate, specs: list[LayerSpec]) -> tuple[dict[str, Any], Any]:
    """The probe's arguments for ``generate``, and what the original returns for them."""
    # Past the shortest window where that is short, so that windows are compared too.
    window = min((spec.window for spec in specs if 0 < spec.window <= 64), default=4)
    prompts = [_tokens(model, window + 13, 1), _tokens(model, 5, 2)]
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    inputs = {
        "inputs": torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]),
        "attention_mask": torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
    }
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    try:
        return {**inputs, "generation_config": config}, original(**inputs, generation_config=config)
    except Exception as error:
        raise NotExact(f"the original generate fails on the probe ({_line(error)})") from error


def _compare(
    model: Any, original: Generate, inputs: dict[str, Any], expected: Any, actual: Sequence[torch.Tensor]
) -> str:
    """A sentence on how close ``actual`` logits are to the expected output's.

    Raises:
        NotExact: not close enough to be rounding.
    """
    worst = max(_difference(want, got.to(want.device)) for want, got in zip(expected.logits, actual, strict=True))
    tolerance = TOLERANCE.get(model.dtype, 5e-2)
    if worst > tolerance and model.dtype in (torch.float16, torch.bfloat16):
        # Half precision may round more than that: by as much as the original differs from itself.
        tolerance = max(tolerance, 2 * _own_noise(original, inputs, expected))
    if not worst <= tolerance:
        raise NotExact(f"logits differ from the original's by {worst:.1e} of their spread, more than {tolerance:.1e}")
    return f"logits within {worst:.1e} of the original's on the probe"


def _own_noise(original: Generate, inputs: dict[str, Any], expected: Any) -> float:
    """How far the original's logits for a row alone are from those for the row in the batch."""
    noise = [0.0]
    for row, mask in enumerate(inputs["attention_mask"]):
        start = int((mask == 0).sum())
        given = {name: inputs[name][row : row + 1, start:] for name in ("inputs", "attention_mask")}
        alone = original(**given, generation_config=inputs["generation_config"])
        tokens = alone.sequences[0, len(mask) - start :].tolist()
        same = expected.sequences[row, len(mask) :].tolist()
        for step, (want, got) in enumerate(zip(expected.logits, alone.logits, strict=True)):
            if tokens[:step] != same[:step]:
                break
            noise.append(_difference(want[row], got[0]))
    return max(noise)


def _forced(
    runner: Runner, specs: list[LayerSpec], inputs: dict[str, Any], expected: Any
) -> tuple[list[torch.Tensor], list[States]]:
    """Packed forwards on the probe's prompts and then the tokens that the original chose.

    Returns:
        Logits ``[2, vocabulary]`` before each of those tokens, and each layer's keys and values of the first row.
    """
    longest = inputs["inputs"].shape[1]
    total = expected.sequences.shape[1]
    pads = (inputs["attention_mask"] == 0).sum(1).tolist()
    pool = BlockPool(specs, Options(block_size=4, num_blocks=2 * (total // 4 + 1)))
    tokens = [row[pad:] for row, pad in zip(expected.sequences.tolist(), pads, strict=True)]
    rows = [Row(row[: longest - pad], len(row)) for row, pad in zip(tokens, pads, strict=True)]
    logits = []
    for _ in range(total - longest):
        for row in rows:
            pool.allocator.reserve(row.table, len(row.token_ids))
        logits.append(runner.run(pool, [(row, row.pending) for row in rows]))
        for row, every in zip(rows, tokens, strict=True):
            row.token_ids.append(every[len(row.token_ids)])
    return logits, [pool.states(layer, rows[0].table, rows[0].computed) for layer in pool.layers]


def _check_windows(specs: list[LayerSpec], cache: Any) -> None:
    """Refuse a model whose cache forgets tokens that its masks still show."""
    layers = getattr(cache, "layers", [])
    for spec in specs:
        if spec.layer_idx is not None and spec.layer_idx < len(layers):
            window = getattr(layers[spec.layer_idx], "sliding_window", None)
            if window is not None and window != spec.window:
                raise NotExact(f"a cache of the last {window} tokens under a mask that shows {spec.window or 'all'}")


def _with_layer_idx(specs: list[LayerSpec], cache: Any, states: list[States]) -> list[LayerSpec] | None:
    """``specs`` whose ``layer_idx`` are the layers of ``cache`` that hold the same; ``None`` where one does not.

    A layer that the original leaves empty (it reads another's states) gets no index.
    """
    found = []
    for spec, (keys, values) in zip(specs, states, strict=True):
        if cache is None or spec.layer_idx is None or spec.layer_idx >= len(cache.layers):
            return None
        layer = cache.layers[spec.layer_idx]
        if getattr(layer, "keys", None) is None:
            found.append(replace(spec, layer_idx=None))
            continue
        for cached, state in ((layer.keys[0], keys), (layer.values[0], values)):
            length = cached.shape[1]
            if cached.shape != state[:, -length:].shape or _difference(cached, state[:, -length:]) > 5e-2:
                return None
        found.append(spec)
    indices = [spec.layer_idx for spec in found if spec.layer_idx is not None]
    return found if len(set(indices)) == len(indices) else None


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
    device = model.device.type
    with torch.no_grad(), torch.autocast(device, enabled=False), torch.random.fork_rng(devices=[]):
        try:
            model.eval()
            model.generation_config = GenerationConfig()
            yield
        finally:
            model.generation_config = generation_config
            for module in training:
                module.training = True
