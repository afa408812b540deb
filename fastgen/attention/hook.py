"""Our attention and mask functions inside transformers, and the switch that turns them on around our own forwards.

A forward is ours when :data:`_STEP` is set in its context. Any other forward on the same model, from another thread
say, meets the same two functions and is handed on to what the model was configured with.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastgen.attention.base import AttentionBackend, Scoring, StepLayout
from fastgen.cache.pool import LayerCache, LayerSpec

NAME = "fastgen_paged"

_HANDLED = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
_IRRELEVANT = {"position_ids", "position_embeddings", "cache", "past_key_values", "attention_mask", "input_ids"}


class UnsupportedAttention(RuntimeError):
    """A layer asks for something that the paged path does not compute exactly."""


class PagedName(str):
    """The name :data:`NAME` in a config, with the name that it stands in for."""

    original: str | None
    forwards: int
    """How many of our forwards run on the config."""

    def __new__(cls, original: str | None) -> PagedName:
        name = super().__new__(cls, NAME)
        name.original, name.forwards = original, 0
        return name


class PagedStep:
    """One forward over the pool: hands each attention call its layer's cache, in the order of the calls."""

    def __init__(self, backend: AttentionBackend, layers: list[LayerCache], layout: StepLayout) -> None:
        self.backend = backend
        self.layers = layers
        self.calls = 0
        self._layouts = {layout.slots.device: layout}

    def mask(self, mask_function: Callable[..., torch.Tensor], device: torch.device) -> torch.Tensor | None:
        return None

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **more: Any,
    ) -> torch.Tensor:
        """``query`` ``[1, heads, T, dim]`` and the like; returns ``[1, T, heads, value_dim]``."""
        cache = self.layers[self.calls]
        self.calls += 1
        device = query.device
        if device not in self._layouts:
            self._layouts[device] = next(iter(self._layouts.values())).to(device)
        layout = self._layouts[device]
        self.backend.write(cache, layout, key[0], value[0])
        scale = more.get("scaling")
        if getattr(module.config._attn_implementation, "original", None) == "sdpa":
            # Transformers' sdpa leaves these out, where it does not refuse them.
            more = {**more, "softcap": None, "s_aux": None}
        scoring = Scoring(
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            window=cache.spec.window,
            softcap=more.get("softcap"),
            sinks=more.get("s_aux"),
        )
        return self.backend.attend(query[0], cache, layout, scoring)[None]


class RecordingStep(PagedStep):
    """The probe's first forward: learns what each layer caches and refuses what the backends do not compute.

    It attends as one sequence; its output is only good for shapes.
    """

    def __init__(self, tokens: int) -> None:
        self.specs: list[LayerSpec] = []
        self.tokens = tokens

    def mask(self, mask_function: Callable[..., torch.Tensor], device: torch.device) -> torch.Tensor | None:
        """The window of ``mask_function`` in a tensor shaped like a mask, for :meth:`attend` to read."""
        return torch.full((1, 1, 1, 1), window_of(mask_function), dtype=torch.int32, device=device)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **more: Any,
    ) -> torch.Tensor:
        if query.shape[0] != 1 or query.shape[2] != self.tokens or key.shape[2] != self.tokens:
            raise UnsupportedAttention(f"attention over {tuple(key.shape)} keys for {self.tokens} tokens")
        if more.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise UnsupportedAttention("attention that is not causal")
        for name, argument in more.items():
            if isinstance(argument, torch.Tensor) and name not in _HANDLED | _IRRELEVANT:
                raise UnsupportedAttention(f"an attention argument that the paged path does not know: {name}")
        if isinstance(mask, torch.Tensor) and (mask.dtype != torch.int32 or mask.numel() != 1):
            raise UnsupportedAttention("an attention mask made by the model itself")
        window = int(mask) if isinstance(mask, torch.Tensor) else more.get("sliding_window") or 0
        layer_idx = getattr(module, "layer_idx", None)
        self.specs.append(
            LayerSpec(
                kv_heads=key.shape[1],
                key_dim=key.shape[-1],
                value_dim=value.shape[-1],
                dtype=key.dtype,
                device=key.device,
                window=int(window),
                layer_idx=layer_idx if isinstance(layer_idx, int) else None,
            )
        )
        return query.new_zeros(1, self.tokens, query.shape[1], value.shape[-1])


_STEP: ContextVar[PagedStep | None] = ContextVar("fastgen_step", default=None)


def window_of(mask_function: Callable[..., torch.Tensor]) -> int:
    """The sliding window of a transformers mask function, 0 for plain causal.

    Read off its values: which keys the queries at a few positions see, far enough out for any real window.

    Raises:
        UnsupportedAttention: it is neither (chunks, prefixes, blocks, …).
    """
    zero = torch.zeros((), dtype=torch.long)
    windows = set()
    for position in (0, 1, 97, 131071, 1048573):
        keys = torch.arange(position + 2)
        try:
            seen = mask_function(zero, zero, torch.full_like(keys, position), keys).expand(position + 2)
        except (RuntimeError, IndexError, TypeError) as error:
            raise UnsupportedAttention(f"a mask that depends on the call ({error})") from error
        window = int(seen.sum())
        if seen[-1] or not bool(seen[position + 1 - window : position + 1].all()) or not window:
            raise UnsupportedAttention("a mask that is neither causal nor a sliding window")
        windows.add(0 if window == position + 1 else window)
    windows.discard(0)
    if len(windows) > 1:
        raise UnsupportedAttention("a mask that is neither causal nor a sliding window")
    return windows.pop() if windows else 0


def register() -> None:
    """Make :data:`NAME` known to transformers. Idempotent; the functions hold no state."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    step = _STEP.get()
    if step is not None:
        return step.attend(module, query, key, value, attention_mask, **kwargs), None
    original = original_name(module.config._attn_implementation)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)(module, query, key, value, attention_mask, **kwargs)


def _mask(*args: Any, mask_function: Callable[..., torch.Tensor], config: PreTrainedConfig, **kwargs: Any) -> Any:
    step = _STEP.get()
    if step is not None:
        return step.mask(mask_function, kwargs.get("device", torch.device("cpu")))
    function = ALL_MASK_ATTENTION_FUNCTIONS.get(original_name(config._attn_implementation))
    # What has no mask function of its own gets no mask from transformers either.
    return None if function is None else function(*args, mask_function=mask_function, config=config, **kwargs)


def original_name(name: str | None) -> str | None:
    return name.original if isinstance(name, PagedName) else name


_SWITCHING = threading.Lock()


class AttentionSwitch:
    """Points a model's configs at :data:`NAME` while at least one of our forwards runs.

    Models may share a config, and threads a model: the name in a config counts the forwards that need it there.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._configs = list(_configs(model))

    @contextmanager
    def running(self, step: PagedStep) -> Iterator[None]:
        """Within this context a forward of this thread is ``step``."""
        token, held = None, []
        try:
            token = _STEP.set(step)
            with _SWITCHING:
                for config in self._configs:
                    _hold(config)
                    held.append(config)
            yield
        finally:
            with _SWITCHING:
                for config in held:
                    _let_go(config)
            if token is not None:
                _STEP.reset(token)


def _hold(config: PreTrainedConfig) -> None:
    name = config._attn_implementation_internal
    if not isinstance(name, PagedName):
        name = config._attn_implementation_internal = PagedName(name)
    name.forwards += 1


def _let_go(config: PreTrainedConfig) -> None:
    name = config._attn_implementation_internal
    if isinstance(name, PagedName):  # else somebody has set another meanwhile
        name.forwards -= 1
        if name.forwards == 0:
            config._attn_implementation_internal = name.original


def within_step() -> bool:
    """Whether this thread is inside one of our forwards, in a hook of the model's, say."""
    return _STEP.get() is not None


@contextmanager
def suspended() -> Iterator[None]:
    """Within this context forwards of this thread are not ours."""
    token = _STEP.set(None)
    try:
        yield
    finally:
        _STEP.reset(token)


def _configs(model: torch.nn.Module) -> Iterator[PreTrainedConfig]:
    """Every config that a module of ``model`` may read its attention implementation from, each once."""
    seen: set[int] = set()
    pending = [
        config for module in model.modules() if isinstance(config := getattr(module, "config", None), PreTrainedConfig)
    ]
    while pending:
        config = pending.pop()
        if id(config) in seen or not hasattr(config, "_attn_implementation_internal"):
            continue
        seen.add(id(config))
        yield config
        pending += [
            sub for key in config.sub_configs if isinstance(sub := getattr(config, key, None), PreTrainedConfig)
        ]
