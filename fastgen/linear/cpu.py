"""The fastest stock call for a float32 projection on a CPU without AVX-512, where small batches spend their time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

MIN_ROWS = 4
"""With fewer rows, reading the weights is all the work, and nothing is gained."""
MAX_ROWS = 64
"""Up to this many rows, ``weight @ states.T`` is faster than ``states @ weight.T`` (benchmarks/linears.py)."""
VOCABULARY = 8192
"""From this many outputs on, oneDNN's own call is faster still."""


def projections(dtype: torch.dtype, device: torch.device, rows: int) -> AbstractContextManager[Any]:
    """A context for a forward over ``rows`` tokens of a model of ``dtype``."""
    gains = device.type == "cpu" and dtype is torch.float32 and MIN_ROWS <= rows <= MAX_ROWS
    if gains and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return CpuLinears()
    return nullcontext()


class CpuLinears(TorchFunctionMode):
    """Computes ``linear`` in this thread by the faster of the equivalent ways: the same sums in another order."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not linear or kwargs or not _is_plain(args[0], args[1]):
            return func(*args, **(kwargs or {}))
        return _product(args[0], args[1], args[2] if len(args) > 2 else None)


def _is_plain(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether these are ordinary float32 tensors, and rows within the bounds."""
    ordinary = type(states) is torch.Tensor and type(weight) in (torch.Tensor, torch.nn.Parameter)
    if not ordinary or weight.ndim != 2 or states.dtype is not torch.float32 or weight.dtype is not torch.float32:
        return False
    return MIN_ROWS * weight.shape[1] <= states.numel() <= MAX_ROWS * weight.shape[1]


def _product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.shape[0] >= VOCABULARY and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    flat = states.reshape(-1, weight.shape[1])
    product = torch.mm(weight, flat.t()) if bias is None else torch.addmm(bias[:, None], weight, flat.t())
    return product.t().contiguous().view(*states.shape[:-1], weight.shape[0])
