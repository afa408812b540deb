"""Properties of the block allocator; no tensor is made here."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastgen.cache.blocks import BlockAllocator, BlockTable, OutOfBlocks


class Allocator(RuleBasedStateMachine):
    """Random growth, forks, writes and releases against a model that only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(num_blocks=23, block_size=4)
        self.tables: list[BlockTable] = []

    @rule(tokens=st.integers(1, 60), expected=st.integers(0, 200))
    def open(self, tokens: int, expected: int) -> None:
        table = BlockTable()
        if self.grow(table, tokens, expected):
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99), more=st.integers(0, 40), expected=st.integers(0, 200))
    def extend(self, pick: int, more: int, expected: int) -> None:
        table = self.tables[pick % len(self.tables)]
        self.grow(table, len(table.blocks) * 4 + more, expected)

    def grow(self, table: BlockTable, tokens: int, expected: int) -> bool:
        missing = self.allocator.blocks_for(tokens) - len(table.blocks)
        before, free = list(table.blocks), self.allocator.free
        if missing > free:
            with pytest.raises(OutOfBlocks):
                self.allocator.reserve(table, tokens, expected)
            assert (table.blocks, self.allocator.free) == (before, free)
            return False
        self.allocator.reserve(table, tokens, expected)
        assert table.blocks[: len(before)] == before
        assert len(table.blocks) == max(self.allocator.blocks_for(tokens), len(before))
        return True

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99))
    def fork(self, pick: int) -> None:
        self.tables.append(self.allocator.fork(self.tables[pick % len(self.tables)]))

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99), index=st.integers(0, 99))
    def write(self, pick: int, index: int) -> None:
        table = self.tables[pick % len(self.tables)]
        index %= len(table.blocks)
        holders = sum(table.blocks[index] in other.blocks for other in self.tables)
        if holders > 1 and not self.allocator.free:
            with pytest.raises(OutOfBlocks):
                self.allocator.writable(table, index)
            return
        copy = self.allocator.writable(table, index)
        assert (copy is not None) == (holders > 1)
        assert sum(table.blocks[index] in other.blocks for other in self.tables) == 1

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        table = self.tables.pop(pick % len(self.tables))
        self.allocator.release(table)
        assert table.blocks == []

    @invariant()
    def accounts_agree(self) -> None:
        self.allocator.check(self.tables)
        for table in self.tables:
            adjacent = all(b == a + 1 for a, b in zip(table.blocks, table.blocks[1:], strict=False))
            assert adjacent or not table.contiguous


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 16))
def test_waste_is_less_than_a_block_a_row(lengths: list[int], block_size: int) -> None:
    allocator = BlockAllocator(num_blocks=1000, block_size=block_size)
    tables = [BlockTable() for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        for tokens in range(1, length + 1):
            allocator.reserve(table, tokens, expected=64)
    for table, length in zip(tables, lengths, strict=True):
        assert 0 <= len(table.blocks) * block_size - length < block_size


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_rows_that_grow_side_by_side_stay_contiguous(lengths: list[int]) -> None:
    allocator = BlockAllocator(num_blocks=8 * 15, block_size=4)
    tables = [BlockTable() for _ in lengths]
    for tokens in range(1, max(lengths) + 1):
        for table, length in zip(tables, lengths, strict=True):
            allocator.reserve(table, min(tokens, length), expected=length)
    assert all(table.contiguous for table in tables)


def test_a_claim_is_no_allocation() -> None:
    allocator = BlockAllocator(num_blocks=10, block_size=1)
    first, second = BlockTable(), BlockTable()
    allocator.reserve(first, 1, expected=10)
    assert allocator.free == 9
    allocator.reserve(second, 9)
    assert allocator.free == 0
    assert sorted(first.blocks + second.blocks) == list(range(10))


@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 40))
def test_shares_never_promise_more_than_there_is(total: int, first: int, second: int) -> None:
    allocator = BlockAllocator(total, 4)
    shares = [allocator.share(first, minimum=1), allocator.share(second, minimum=1)]
    granted = [share.total for share in shares if share is not None]
    assert sum(granted) + allocator.unshared == total
    for share in shares:
        if share is not None:
            table = BlockTable()
            share.reserve(table, share.total * 4)
            with pytest.raises(OutOfBlocks):
                share.reserve(table, share.total * 4 + 1)
            share.release(table)
            share.close()
    assert allocator.unshared == allocator.free == total
