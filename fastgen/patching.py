"""Attach the paged path to a model, prove it, revert it."""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.utils import logging

from fastgen.attention.base import make_backend
from fastgen.attention.hook import original_name, register, suspended, within_step
from fastgen.calls import CACHE_NAMES, Call, decoding_loop, run_call, run_original
from fastgen.engine.engine import Engine
from fastgen.engine.padded import PaddedEngine
from fastgen.engine.runner import Runner
from fastgen.exact import NotExact
from fastgen.options import Options
from fastgen.probe import check_model, exact_length, probe_packed, probe_padded
from fastgen.status import LastCall, Status

logger = logging.get_logger(__name__)
Model = TypeVar("Model", bound=torch.nn.Module)


_STOCK_VALUES: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "is_assistant": (None, False),
    "token_healing": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "prefill_chunk_size": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
"""Generation settings that ask for another loop than greedy search or sampling, and the values that do not."""

_POSITIONAL = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
)
"""Parameters of ``GenerationMixin.generate`` in order."""


class PatchedGenerate:
    """What stands in for ``model.generate``: the paged path where it is exact, the original where it is not."""

    def __init__(self, model: Any, options: Options, own_original: Callable[..., Any] | None = None) -> None:
        self.model = model
        self.options = options
        self.engine: Engine | PaddedEngine | None = None
        self.reason: str | None = None
        self.last_call: LastCall | None = None
        self.counters: Counter[str] = Counter()
        self._fills_cache = False
        self._unpacked = ""
        self._fingerprint: tuple[Any, ...] = ()
        self._lock = threading.Lock()
        self.own_original = own_original
        """A ``generate`` that the instance carried before us; most have their class's."""
        functools.update_wrapper(self, self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """The un-patched ``generate``."""
        return self.own_original or MethodType(type(self.model).generate, self.model)

    def verify(self) -> None:
        """Choose the model's path: look at its config, then compare it with the original on a probe."""
        register()
        self.engine = None
        self._fingerprint = self._current()
        try:
            check_model(self.model)
            self.engine, self.reason = self._packed() or self._padded()
        except NotExact as reason:
            self.reason = str(reason)
            logger.warning("fastgen: %s stays on the original path: %s", type(self.model).__name__, reason)

    def _packed(self) -> tuple[Engine, str] | None:
        """Rows of any lengths packed into one forward, attention ours."""
        try:
            runner = Runner(self.model, make_backend(self.options.attn_implementation))
            finding = probe_packed(self.model, runner, self.original, self.options)
        except NotExact as reason:
            self._unpacked = str(reason)
            return None
        self._fills_cache = finding.fills_cache
        return Engine(runner, finding.specs, self.options), finding.reason

    def _padded(self) -> tuple[PaddedEngine, str]:
        """The model's own attention on its own padded batch, over the paged cache."""
        try:
            engine, reason = probe_padded(self.model, self.original, self.options)
        except NotExact as padded:
            raise NotExact(f"{self._unpacked}; {padded}") from padded
        return engine, f"padded batches, since {self._unpacked}; {reason}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if within_step():
            self.note("hf", "a call from inside a forward of fastgen's")
            with suspended():
                return self.original(*args, **kwargs)
        streamer = _argument("streamer", args, kwargs)
        try:
            engine, kwargs = self.prepare(args, kwargs)
        except NotExact as reason:
            self.note("hf", str(reason))
            return self.original(*args, **kwargs)
        loop = decoding_loop(functools.partial(self._decode, engine), streamer)
        return self.original(*args, custom_generate=loop, **kwargs)

    def current_engine(self) -> Engine | PaddedEngine | None:
        """The engine for the model as it is now, proven anew if its dtype, device or attention has changed."""
        with self._lock:
            if self._fingerprint != self._current():
                self.verify()
            return self.engine

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Engine | PaddedEngine, dict[str, Any]]:
        """The engine to use, and keyword arguments for the original with our loop in it.

        Raises:
            NotExact: the call needs the original loop; nothing has been touched.
        """
        engine = self.current_engine()
        if engine is None:
            raise NotExact(self.reason or "")
        self._check_arguments(args, kwargs)
        self._check_state()
        return engine, _with_stop_strings(args, kwargs, self.model.generation_config)

    def _decode(self, engine: Engine | PaddedEngine, model: Any, call: Call) -> Any:
        """Our decoding loop, called by transformers in place of its own."""
        try:
            if isinstance(engine, PaddedEngine):
                output, how = engine.run_call(model, call), "padded batch, the model's own attention"
            else:
                self.check_call(call)
                output, how = run_call(model, call, engine, self._fills_cache), "packed"
        except NotExact as reason:
            self.note("hf", str(reason))
            return run_original(model, call)
        self.note("paged", how)
        return output

    def check_call(self, call: Call) -> None:
        """Refuse a prepared call that the paged path does not do exactly.

        Raises:
            NotExact: with the reason.
        """
        limit, length = exact_length(self.model.config), call.stopping_criteria.max_length
        if limit is not None and length is not None and length > limit:
            raise NotExact(f"rope that changes beyond {limit} tokens, and a maximum length of {length}")

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1 and not isinstance(args[1], GenerationConfig | None):
            raise NotExact("an unknown positional argument")
        for name in (
            "custom_generate",
            "assistant_model",
            "synced_gpus",
            *CACHE_NAMES,
            "cache_params",
            "inputs_embeds",
        ):
            value = _argument(name, args, kwargs)
            if value is not None and value is not False:
                raise NotExact(f"the argument {name!r}")
        if _distributed():
            raise NotExact("a sharded model in several processes")
        given = _argument("generation_config", args, kwargs)
        for name, stock in _STOCK_VALUES.items():
            value = kwargs.get(name)
            for config in (given, self.model.generation_config):
                if value is None and config is not None:
                    value = getattr(config, name, None)
            if value not in stock:
                raise NotExact(f"{name}={value!r}")

    def _check_state(self) -> None:
        model = self.model
        if getattr(model, "_compiled_call_impl", None) or hasattr(model.forward, "_torchdynamo_orig_callable"):
            raise NotExact("a compiled forward")
        if torch.is_autocast_enabled(model.device.type):
            raise NotExact("autocast")
        if model.training and (_checkpoints(model) or _drops_out(model)):
            raise NotExact("training mode with dropout or gradient checkpointing")

    def _current(self) -> tuple[Any, ...]:
        """What the probe's result depends on and a user may change."""
        model = self.model
        config = model.config.get_text_config()
        shape = ("num_hidden_layers", "sliding_window", "layer_types", "rope_parameters")
        return (
            model.dtype,
            model.device,
            original_name(model.config._attn_implementation),
            str(getattr(model, "hf_device_map", None)),
            *(str(getattr(config, name, None)) for name in shape),
        )

    def note(self, path: str, reason: str) -> None:
        self.last_call = LastCall(path, reason)
        self.counters[f"calls_{path}"] += 1
        if path == "hf" and self.engine is not None:
            logger.info("fastgen: this call takes the original path: %s", reason)

    def status(self) -> Status:
        engine = self.engine
        pool = engine.pool if engine is not None else None
        allocator = pool.allocator if pool is not None else None
        counters = self.counters + engine.counters if engine is not None else self.counters
        return Status(
            path="hf" if engine is None else "paged",
            reason=self.reason or "to be checked at the next call",
            last_call=self.last_call,
            attn_implementation=engine.runner.backend.name if isinstance(engine, Engine) else None,
            block_size=self.options.block_size,
            blocks_total=allocator.total if allocator is not None else 0,
            blocks_free=allocator.free if allocator is not None else 0,
            blocks_cached=0,
            pool_bytes=pool.num_bytes if pool is not None else 0,
            int8=False,
            counters=dict(counters),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedGenerate:
        """For a copied model: a patch of its own, proven again at its first call."""
        return PatchedGenerate(copy.deepcopy(self.model, memo), self.options, copy.deepcopy(self.own_original, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model carries the stock ``generate``, and loads where fastgen is not installed."""
        if self.own_original is not None:
            return _itself, (self.own_original,)
        return getattr, (self.model, "generate")


def patch(model: Model, **options: Any) -> Model:
    """Make ``model.generate`` fast, in place, with the results it had.

    Args:
        model: a transformers model, or a PEFT or ``torch.compile`` wrapper around one.
        options: fields of :class:`fastgen.Options`.

    Returns:
        ``model`` itself. Patching again with the same options changes nothing; with others, it starts afresh.

    Raises:
        TypeError, ValueError: an option that does not exist or a value that is not allowed.
    """
    chosen = Options.of(options)
    target = base_model(model)
    present = find(target)
    if present is not None:
        if present.options == chosen:
            present.current_engine()
            return model
        unpatch(target)
    own = target.__dict__.get("generate")
    # A model that was pickled with a patch comes back with its class's own method as an attribute.
    is_stock = own == MethodType(type(target).generate, target)
    patched = PatchedGenerate(target, chosen, None if is_stock else own)
    patched.verify()
    target.generate = patched
    return model


def unpatch(model: Model) -> Model:
    """Put the original ``generate`` back and free the pool. On a model that is not patched, nothing happens."""
    target = base_model(model)
    patched = find(target)
    if patched is not None:
        del target.__dict__["generate"]
        if patched.own_original is not None:
            target.generate = patched.own_original
    return model


def status(model: torch.nn.Module) -> Status:
    """What fastgen does on ``model``; also on one that is not patched."""
    patched = find(base_model(model))
    return patched.status() if patched is not None else Status.of_stock()


def find(target: Any) -> PatchedGenerate | None:
    """The patch on ``target``, if it has one."""
    patched = target.__dict__.get("generate")
    return patched if isinstance(patched, PatchedGenerate) else None


def base_model(model: Any) -> Any:
    """The transformers model within PEFT's and torch.compile's wrappers.

    Raises:
        TypeError: there is none.
    """
    inner = getattr(model, "_orig_mod", model)
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, torch.nn.Module) or not hasattr(inner, "generate") or not hasattr(inner, "config"):
        raise TypeError(f"fastgen: {type(model).__name__} is not a transformers model with a generate method")
    return inner


def _itself(value: Any) -> Any:
    return value


def _argument(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position = _POSITIONAL.index(name) if name in _POSITIONAL else len(args)
    return args[position] if position < len(args) else kwargs.get(name)


def _with_stop_strings(args: tuple[Any, ...], kwargs: dict[str, Any], defaults: GenerationConfig) -> dict[str, Any]:
    """``kwargs`` with stop strings as a criterion: transformers gives a custom loop no tokenizer to make it with."""
    config, tokenizer = _argument("generation_config", args, kwargs), kwargs.get("tokenizer")
    strings = kwargs.get("stop_strings") or getattr(config, "stop_strings", None)
    if getattr(defaults, "stop_strings", None):
        raise NotExact("stop strings in model.generation_config")
    if not strings or tokenizer is None:
        return kwargs
    if len(args) > 1:
        raise NotExact("stop strings beside positional arguments")
    kwargs = {**kwargs, "stop_strings": None}
    if config is not None:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].stop_strings = None
        del kwargs["stop_strings"]
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    if not any(isinstance(criterion, StopStringCriteria) for criterion in criteria):
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    kwargs["stopping_criteria"] = criteria
    return kwargs


def _distributed() -> bool:
    """Whether other processes may have to run the same number of forwards."""
    available = torch.distributed.is_available() and torch.distributed.is_initialized()
    return available and torch.distributed.get_world_size() > 1


def _checkpoints(model: torch.nn.Module) -> bool:
    """Whether transformers' gradient checkpointing is on: its layers then take no cache in training mode."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _drops_out(model: torch.nn.Module) -> bool:
    """Whether a forward in training mode draws random numbers."""
    if any(isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()):
        return True
    settings = model.config.to_dict().items()  # type: ignore[union-attr,operator]
    return any(
        ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0 for name, value in settings
    )
