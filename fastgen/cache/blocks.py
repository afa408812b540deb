"""Blocks of the paged cache: who holds which, and where the next one lies. No tensor is touched here."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

FREE, CLAIMED, USED = 0, 1, 2
MAX_CLAIM = 512


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than asked for."""


@dataclass(eq=False)
class BlockTable:
    """The blocks of one row, in token order."""

    blocks: list[int] = field(default_factory=list)
    contiguous: bool = True
    """Whether the blocks lie one behind the other, so that the row is one slice of the pool."""
    claim: tuple[int, int] = (0, 0)
    """Blocks ``[start, end)`` that this row would like to grow into. Others may take them when nothing else is free."""


class BlockAllocator:
    """Hands out blocks of ``block_size`` tokens, with reference counts; thread-safe.

    A new row *claims* a run of free blocks as long as it is expected to become. A claim is no allocation: it only
    steers other rows elsewhere while there is room, so that most rows stay one contiguous slice of the pool.
    """

    def __init__(
        self, num_blocks: int, block_size: int, on_free: Callable[[list[int]], None] = lambda blocks: None
    ) -> None:
        """``on_free`` gets the blocks that nobody holds any more, before anybody else can get them."""
        self.total = num_blocks
        self.block_size = block_size
        self.free = num_blocks
        self.unshared = num_blocks
        """Blocks not promised to any :class:`Share`."""
        self._state = bytearray(num_blocks)
        self._owner: array[int] = array("q", [0]) * num_blocks
        self._references = array("l", [0]) * num_blocks
        self._on_free = on_free
        self._lock = threading.Lock()

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill."""
        return -(-tokens // self.block_size)

    def share(self, wanted: int, minimum: int) -> Share | None:
        """Promise up to ``wanted`` blocks to one user of the pool; ``None`` if not even ``minimum`` are left."""
        with self._lock:
            granted = min(wanted, self.unshared)
            if granted < minimum:
                return None
            self.unshared -= granted
            return Share(self, granted)

    def reserve(self, table: BlockTable, tokens: int, expected: int = 0) -> None:
        """Grow ``table`` until it holds ``tokens`` tokens.

        Args:
            expected: tokens that the row may grow to, for the claim.

        Raises:
            OutOfBlocks: there are too few free blocks; the table is unchanged.
        """
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing <= 0:
            return
        with self._lock:
            if missing > self.free:
                raise OutOfBlocks(f"{missing} blocks asked for, {self.free} of {self.total} free")
            for _ in range(missing):
                left = max(self.blocks_for(max(tokens, expected)) - len(table.blocks), 1)
                self._append(table, self._next(table, left))

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table on the same blocks. Shared blocks are read-only: see :meth:`writable`."""
        with self._lock:
            for block in table.blocks:
                self._references[block] += 1
        return BlockTable(list(table.blocks), table.contiguous)

    def writable(self, table: BlockTable, index: int) -> tuple[int, int] | None:
        """Make block ``index`` of ``table`` its own before it is written to.

        Returns:
            ``(source, target)`` when the caller must copy the block's content, else ``None``.
        """
        with self._lock:
            source = table.blocks[index]
            if self._references[source] == 1:
                return None
            if not self.free:
                raise OutOfBlocks(f"1 block asked for, 0 of {self.total} free")
            target = self._next(BlockTable(), 1)
            self._take(target)
            self._references[source] -= 1
            table.blocks[index] = target
            table.contiguous = all(b == a + 1 for a, b in zip(table.blocks, table.blocks[1:], strict=False))
            return source, target

    def room(self, table: BlockTable) -> int:
        """Blocks from the first of a contiguous ``table`` to the next that is in use and not its own."""
        used = self._state.find(USED, table.blocks[-1] + 1)
        return (used if used >= 0 else self.total) - table.blocks[0]

    def release(self, table: BlockTable) -> None:
        """Give back the blocks and the claim of ``table``; it is empty afterwards and may be used again."""
        with self._lock:
            for block in table.blocks:
                self._references[block] -= 1
            freed = [block for block in table.blocks if self._references[block] == 0]
            if freed:
                self._on_free(freed)
            for block in freed:
                self._state[block] = FREE
            self.free += len(freed)
            self._drop_claim(table)
            table.blocks, table.contiguous = [], True

    def check(self, tables: list[BlockTable]) -> None:
        """Raise ``AssertionError`` unless the accounting agrees with ``tables``, all tables alive."""
        counts = [0] * self.total
        for table in tables:
            for block in table.blocks:
                counts[block] += 1
        if counts != list(self._references):
            raise AssertionError("reference counts differ from the tables")
        if self.free != counts.count(0) or any(
            (s == USED) != (c > 0) for s, c in zip(self._state, counts, strict=True)
        ):
            raise AssertionError("free blocks differ from the tables")

    def _append(self, table: BlockTable, block: int) -> None:
        self._take(block)
        table.contiguous = table.contiguous and (not table.blocks or block == table.blocks[-1] + 1)
        table.blocks.append(block)

    def _take(self, block: int) -> None:
        self._state[block] = USED
        self._references[block] = 1
        self.free -= 1

    def _next(self, table: BlockTable, expected: int) -> int:
        """The best free block for ``table``: the next of its claim, else of a new claim, else anyone's claim."""
        following = table.blocks[-1] + 1 if table.blocks else table.claim[0]
        if following < table.claim[1] and self._state[following] == CLAIMED and self._owner[following] == id(table):
            return following
        self._drop_claim(table)
        if table.blocks and following < self.total and self._state[following] == FREE:
            return following
        size = min(expected, MAX_CLAIM)
        while size:
            start = self._state.find(bytes(size))
            if start >= 0:
                self._claim(table, start, size)
                return start
            size //= 2
        return self._state.rfind(bytes([CLAIMED]))

    def _claim(self, table: BlockTable, start: int, size: int) -> None:
        table.claim = (start, start + size)
        for block in range(start, start + size):
            self._state[block] = CLAIMED
            self._owner[block] = id(table)

    def _drop_claim(self, table: BlockTable) -> None:
        for block in range(*table.claim):
            if self._state[block] == CLAIMED and self._owner[block] == id(table):
                self._state[block] = FREE
        table.claim = (0, 0)


class Share:
    """Blocks of an allocator promised to one user: what others do can neither starve nor block it.

    Has the part of the allocator's interface that scheduling needs.
    """

    def __init__(self, allocator: BlockAllocator, total: int) -> None:
        self.total = total
        self.free = total
        self.block_size = allocator.block_size
        self._allocator = allocator

    def blocks_for(self, tokens: int) -> int:
        return self._allocator.blocks_for(tokens)

    def reserve(self, table: BlockTable, tokens: int, expected: int = 0) -> None:
        missing = max(self.blocks_for(tokens) - len(table.blocks), 0)
        if missing > self.free:
            raise OutOfBlocks(f"{missing} blocks asked for, {self.free} of {self.total} free")
        self._allocator.reserve(table, tokens, expected)
        self.free -= missing

    def release(self, table: BlockTable) -> None:
        self.free += len(table.blocks)
        self._allocator.release(table)

    def close(self) -> None:
        """Hand the promise back; every table must have been released."""
        with self._allocator._lock:
            self._allocator.unshared += self.total
        self.total = self.free = 0
