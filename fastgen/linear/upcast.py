"""Half-precision projections on a CPU that has no instructions for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

MIN_ROWS = 4
"""Fewer rows than this are faster as they are: reading the weights is all the work (measured, AVX2)."""


def projections(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """A context for a forward of a model of ``dtype``: the faster way to compute its ``linear`` calls here."""
    return Float32Linears() if device.type == "cpu" and not _native(dtype) else nullcontext()


def _native(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies ``dtype`` in hardware; without, it is several times slower than float32."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


class Float32Linears(TorchFunctionMode):
    """Computes each half-precision ``linear`` in float32 and rounds its result once, as a half-precision one does.

    The products are exact and the sums are float32 either way, so results differ by the order of the sums only. The
    weights are converted at each call: no second copy of them stays. Only this thread is affected.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is linear and not kwargs and _is_half(args):
            widened: list[Any] = [None if tensor is None else tensor.float() for tensor in args]
            return linear(*widened).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _is_half(args: tuple[Any, ...]) -> bool:
    states, weight = args[:2]
    half = states.dtype in (torch.bfloat16, torch.float16) and states.dtype == weight.dtype
    return half and states.numel() >= MIN_ROWS * states.shape[-1]
