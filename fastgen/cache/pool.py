"""The tensors of the paged cache, one pair a layer."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fastgen.cache.blocks import BlockAllocator, BlockTable, Share
from fastgen.options import Options


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer caches for a token, as seen in the probe."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int = 0
    """Keys that a query sees, itself included; 0 is all of them."""
    layer_idx: int | None = None
    """The layer's index in a transformers cache, where the module knows it."""

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


@dataclass(frozen=True)
class LayerCache:
    """Keys ``[kv_heads, slots, key_dim]`` and values ``[kv_heads, slots, value_dim]`` of one layer.

    Slot ``block * block_size + offset`` holds a token. Heads come first, so that what one head reads for one row is
    one stretch of memory (measured: 1.5 to 2 times faster on a CPU than tokens first).
    """

    spec: LayerSpec
    keys: torch.Tensor
    values: torch.Tensor


def slots_of(blocks: list[int], block_size: int) -> torch.Tensor:
    """``[len(blocks) * block_size]``: the slots of ``blocks``, in token order."""
    return (torch.tensor(blocks)[:, None] * block_size + torch.arange(block_size)).flatten()


class BlockPool:
    """The cache of one patched model: an allocator and the layers' tensors.

    A slot that belongs to no row holds zeros, so that a backend may read past a row's end, and mask what it finds:
    what a row left behind could be infinite.
    """

    def __init__(self, specs: list[LayerSpec], options: Options) -> None:
        num_blocks = options.num_blocks or _affordable_blocks(specs, options)
        self.allocator = BlockAllocator(num_blocks, options.block_size, on_free=self._clear)
        slots = num_blocks * options.block_size
        # A tensor made under the caller's inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.layers = [
                LayerCache(
                    spec,
                    _zeros((spec.kv_heads, slots, spec.key_dim), spec),
                    _zeros((spec.kv_heads, slots, spec.value_dim), spec),
                )
                for spec in specs
            ]

    def states(self, layer: LayerCache, table: BlockTable, tokens: int) -> States:
        """A copy of the first ``tokens`` entries of a row: ``[kv_heads, tokens, dim]`` each."""
        slots = slots_of(table.blocks, self.allocator.block_size)[:tokens].to(layer.spec.device)
        return layer.keys[:, slots], layer.values[:, slots]

    def _clear(self, blocks: list[int]) -> None:
        size = self.allocator.block_size
        for start, stop in _runs(blocks):
            for layer in self.layers:
                for states in (layer.keys, layer.values):
                    states[:, start * size : stop * size].zero_()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved; on a CPU less is resident (see :attr:`Options.cpu_memory_utilization`)."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` of each run of consecutive numbers in ``blocks``."""
    start = stop = blocks[0]
    for block in blocks:
        if block != stop:
            yield start, stop
            start = block
        stop = block + 1
    yield start, stop


def _zeros(shape: tuple[int, int, int], spec: LayerSpec) -> torch.Tensor:
    """Zeros that on a CPU take no memory before they are written to."""
    if spec.device.type != "cpu":
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, math.prod(shape) * spec.dtype.itemsize, **private)
    return torch.frombuffer(memory, dtype=spec.dtype).view(shape)


class PoolOwner:
    """Holds the pool of one patched model, allocated at the first call, and lends shares of it."""

    def __init__(self, specs: list[LayerSpec], options: Options) -> None:
        self.specs = specs
        self.options = options
        self.pool: BlockPool | None = None
        self.counters: Counter[str] = Counter()
        self.lock = threading.Lock()
        """Held for a step: steps of several threads take turns."""
        self._making = threading.Lock()

    def make_pool(self) -> BlockPool:
        """The pool, allocated now if this is the first call."""
        with self._making:
            if self.pool is None:
                self.pool = BlockPool(self.specs, self.options)
            return self.pool

    @contextmanager
    def share(self, wanted: int | None, minimum: int) -> Iterator[Share | None]:
        """Blocks for one caller, at most ``wanted`` (all that are left for ``None``); ``None`` below ``minimum``."""
        allocator = self.make_pool().allocator
        share = allocator.share(allocator.total if wanted is None else wanted, minimum)
        try:
            yield share
        finally:
            if share is not None:
                share.close()


def _affordable_blocks(specs: list[LayerSpec], options: Options) -> int:
    """Blocks that fit on every device; at least one."""
    block_bytes: dict[torch.device, int] = {}
    for spec in specs:
        block_bytes[spec.device] = block_bytes.get(spec.device, 0) + spec.token_bytes * options.block_size
    return max(1, min(int(_budget(device, options) // size) for device, size in block_bytes.items()))


def _budget(device: torch.device, options: Options) -> float:
    """Bytes that the pool may take on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * options.gpu_memory_utilization
    return available_memory() * options.cpu_memory_utilization


def available_memory() -> int:
    """Bytes of main memory that this process may still take: what the system has free, capped by the cgroup."""
    limits = [_system_available()]
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limits.append(int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):
            continue
    return max(min(limits), 0)


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
