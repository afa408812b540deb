"""Which rows run how many tokens in the next step. No tensor is touched here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from fastgen.cache.blocks import OutOfBlocks, Share
from fastgen.engine.request import Group, Row


class DoesNotFit(RuntimeError):
    """A group needs more blocks than the scheduler may use, even when it runs alone."""

    def __init__(self, group: Group, needed: int, total: int) -> None:
        super().__init__(f"needs {needed} cache blocks of which the pool has {total}")
        self.group = group


class Scheduler:
    """Groups in order of arrival, as many at a time as rows, tokens and blocks allow.

    Groups are admitted when their prompts fit. When a running row finds no block, the group admitted last is
    preempted: its blocks are freed, and it recomputes its tokens when it is its turn again.
    """

    def __init__(
        self,
        blocks: Share,
        groups: Iterable[Group],
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.blocks = blocks
        self.running: list[Group] = []
        self.preemptions = 0
        self._arrivals: Iterator[Group] = iter(groups)
        self._waiting: deque[Group] = deque()
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def schedule(self) -> list[tuple[Row, int]]:
        """Rows of the next step and the tokens each runs; blocks are reserved. Empty when all is done.

        Raises:
            DoesNotFit: the next group cannot run even alone; it is dropped, and scheduling may go on.
        """
        self.retire()
        budget = self._max_num_batched_tokens
        plan: list[tuple[Row, int]] = []
        for group in list(self.running):
            if group in self.running:  # not preempted meanwhile
                budget -= self._plan(group, budget, plan)
        while budget > 0 and (admitted := self._admissible()) is not None:
            self.running.append(admitted)
            budget -= self._plan(admitted, budget, plan)
        return [(row, tokens) for row, tokens in plan if row.computed + tokens <= self._capacity(row)]

    def retire(self) -> None:
        """Free the blocks of rows that ended, and forget the groups that did."""
        for group in self.running:
            for row in group.rows:
                if row.finished:
                    self.free(row)
        self.running = [group for group in self.running if not group.finished]

    def close(self) -> None:
        """Free every block held, whatever state the rows are in."""
        for group in [*self.running, *self._waiting]:
            for row in group.rows:
                self.free(row)
        self.running, self._waiting = [], deque()

    def free(self, row: Row) -> None:
        self.blocks.release(row.table)
        row.computed = 0

    def _capacity(self, row: Row) -> int:
        return len(row.table.blocks) * self.blocks.block_size

    def _plan(self, group: Group, budget: int, plan: list[tuple[Row, int]]) -> int:
        """Add the tokens of ``group`` to ``plan``; decoding rows always run, prompts share the budget."""
        spent = 0
        for row in group.active:
            tokens = 1 if row.pending == 1 else min(row.pending, max(budget - spent, 0))
            if tokens == 0:
                continue
            if not self._reserve(group, row, row.computed + tokens):
                return spent
            plan.append((row, tokens))
            spent += tokens
        return spent

    def _reserve(self, group: Group, row: Row, tokens: int) -> bool:
        """Blocks for ``tokens`` tokens of ``row``, at the cost of later groups; False if ``group`` itself gave way."""
        while True:
            try:
                self.blocks.reserve(row.table, tokens, expected=row.max_cached)
                return True
            except OutOfBlocks:
                victim = self.running[-1]
                if victim is group and len(self.running) == 1:
                    self._evict(group)
                    raise DoesNotFit(group, self._size(group), self.blocks.total) from None
                self._preempt(victim)
                if victim is group:
                    return False

    def _preempt(self, group: Group) -> None:
        self.preemptions += 1
        self._evict(group)
        self._waiting.appendleft(group)

    def _evict(self, group: Group) -> None:
        for row in group.rows:
            self.free(row)
        self.running.remove(group)

    def _admissible(self) -> Group | None:
        """The next waiting group, if there is room for it now."""
        if not self._waiting:
            arrival = next(self._arrivals, None)
            if arrival is None:
                return None
            self._waiting.append(arrival)
        group = self._waiting[0]
        rows = sum(len(other.active) for other in self.running)
        if self.running and (
            rows + len(group.active) > self._max_num_seqs or self._size(group) + rows > self.blocks.free
        ):
            return None
        self._waiting.popleft()
        if self._size(group) > self.blocks.total:
            raise DoesNotFit(group, self._size(group), self.blocks.total)
        return group

    def _size(self, group: Group) -> int:
        """Blocks for the tokens known so far, and one more a row that goes on."""
        return sum(self.blocks.blocks_for(min(len(row.token_ids) + 1, row.max_cached)) for row in group.active)
