"""The fastest stock call for each projection on a CPU without AVX-512: what a small batch spends its time on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

MIN_ROWS = 4
"""With fewer rows, reading the weights is all the work, and nothing is gained."""
TRANSPOSED_ROWS = 64
"""Up to this many rows, ``weight @ states.T`` is faster than ``states @ weight.T`` (benchmarks/linears.py)."""
VOCABULARY = 8192
"""From this many outputs on, oneDNN's own call is faster still."""


def projections(dtype: torch.dtype, device: torch.device, rows: int) -> AbstractContextManager[Any]:
    """A context for a forward over ``rows`` tokens of a model of ``dtype``."""
    if device.type != "cpu" or rows < MIN_ROWS:
        return nullcontext()
    if _emulated(dtype) or (rows <= TRANSPOSED_ROWS and torch.backends.cpu.get_cpu_capability() == "AVX2"):
        return CpuLinears()
    return nullcontext()


def _emulated(dtype: torch.dtype) -> bool:
    """Whether the CPU has no instructions to multiply ``dtype``: it is then several times slower than float32."""
    if dtype is torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


class CpuLinears(TorchFunctionMode):
    """Computes ``linear`` in this thread by the faster of the equivalent ways.

    In float32 the sums are the same but for their order. A half-precision product is exact in float32, is summed there
    and rounded once; against this CPU's own half-precision call that changes more tokens than the original's rounding
    does (README.md, Measured). Weights are converted at each call; no second copy of them stays.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not linear or kwargs or not _is_plain(args[0], args[1]):
            return func(*args, **(kwargs or {}))
        states, weight = args[:2]
        bias = args[2] if len(args) > 2 else None
        if not _emulated(states.dtype):
            return _product(states, weight, bias)
        return _product(states.float(), weight.float(), None if bias is None else bias.float()).to(states.dtype)


def _is_plain(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether these are ordinary tensors of one floating type, and rows enough."""
    ordinary = type(states) is torch.Tensor and type(weight) in (torch.Tensor, torch.nn.Parameter)
    return (
        ordinary and states.dtype == weight.dtype and weight.ndim == 2 and states.numel() >= MIN_ROWS * weight.shape[1]
    )


def _product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = states.numel() // weight.shape[1]
    if rows > TRANSPOSED_ROWS:
        return linear(states, weight, bias)
    if weight.shape[0] >= VOCABULARY and weight.dtype is torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    flat = states.reshape(rows, weight.shape[1])
    product = torch.mm(weight, flat.t()) if bias is None else torch.addmm(bias[:, None], weight, flat.t())
    return product.t().contiguous().view(*states.shape[:-1], weight.shape[0])
