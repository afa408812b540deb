"""Properties of the scheduler, with rows that end by count; no tensor is made here."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.cache.blocks import BlockAllocator
from fastgen.engine.request import Group, Row
from fastgen.engine.scheduler import DoesNotFit, Scheduler


class Counted(Group):
    """Rows of given prompt lengths that each emit ``new`` tokens, a running number."""

    def __init__(self, prompts: list[int], new: int) -> None:
        self.prompts = prompts
        self.new = new
        self.rows = [Row(list(range(length)), length + new) for length in prompts]

    def advance(self, logits: torch.Tensor) -> None:
        raise AssertionError("the scheduler reads no logits")

    def step(self) -> None:
        for row in self.active:
            row.token_ids.append(len(row.token_ids))
            row.finished = len(row.token_ids) >= row.max_tokens


groups_strategy = st.lists(
    st.builds(Counted, st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(1, 12)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=200, deadline=None)
@given(groups_strategy, st.integers(4, 30), st.integers(1, 6), st.integers(1, 40))
def test_every_group_ends_or_is_refused(groups: list[Counted], blocks: int, seqs: int, tokens: int) -> None:
    allocator = BlockAllocator(blocks, 4)
    share = allocator.share(blocks, 1)
    assert share is not None
    scheduler = Scheduler(share, groups, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    refused: list[Group] = []
    for _ in range(10_000):
        try:
            plan = scheduler.schedule()
        except DoesNotFit as misfit:
            refused.append(misfit.group)
            continue
        if not plan:
            break
        planned = [row for row, _ in plan]
        assert len(set(map(id, planned))) == len(planned)
        decoding = sum(1 for row, count in plan if row.pending == 1)
        assert sum(count for _, count in plan) <= max(tokens, decoding) + decoding
        for row, count in plan:
            assert 0 < count <= row.pending
            assert len(row.table.blocks) == allocator.blocks_for(row.computed + count) or row.table.blocks
            row.computed += count
        allocator.check([row.table for group in groups for row in group.rows])
        for group in list(scheduler.running):
            if all(row.pending == 0 for row in group.active):
                group.step()  # type: ignore[attr-defined]
    else:
        raise AssertionError("the scheduler does not end")
    scheduler.close()
    for group in groups:
        needed = sum(allocator.blocks_for(length + group.new - 1) for length in group.prompts)
        assert group.finished != (group in refused)
        assert (group in refused) == (needed > blocks)
        if group.finished:
            assert [len(row.token_ids) for row in group.rows] == [length + group.new for length in group.prompts]
    share.close()
    assert allocator.free == allocator.unshared == blocks


def test_admission_is_in_order_and_preemption_takes_the_last() -> None:
    allocator = BlockAllocator(6, 4)
    share = allocator.share(6, 1)
    assert share is not None
    first, second = Counted([8], 12), Counted([8], 12)
    scheduler = Scheduler(share, [first, second], max_num_seqs=8, max_num_batched_tokens=64)
    order = []
    while plan := scheduler.schedule():
        for row, count in plan:
            row.computed += count
        for group in list(scheduler.running):
            group.step()  # type: ignore[attr-defined]
            if group.finished:
                order.append(group)
    assert order == [first, second]
    assert scheduler.preemptions > 0


def test_a_prompt_larger_than_the_pool_names_the_sizes() -> None:
    allocator = BlockAllocator(3, 4)
    share = allocator.share(3, 1)
    assert share is not None
    scheduler = Scheduler(share, [Counted([40], 4), Counted([4], 1)], max_num_seqs=8, max_num_batched_tokens=64)
    try:
        scheduler.schedule()
    except DoesNotFit as misfit:
        assert "11" in str(misfit) and "3" in str(misfit)
    else:
        raise AssertionError("it should not fit")
    assert len(scheduler.schedule()) == 1
