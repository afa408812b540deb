"""The engine of one patched model: its pool, and the loop that runs groups to their end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from fastgen.cache.blocks import Share
from fastgen.cache.pool import LayerSpec, PoolOwner
from fastgen.engine.request import Group, Row
from fastgen.engine.runner import Runner
from fastgen.engine.scheduler import DoesNotFit, Scheduler
from fastgen.options import Options


class Engine(PoolOwner):
    """Steps groups of rows through the model. Several threads may run groups at once, each within its own share."""

    def __init__(self, runner: Runner, specs: list[LayerSpec], options: Options) -> None:
        super().__init__(specs, options)
        self.runner = runner

    def run(
        self,
        groups: Iterable[Group],
        share: Share,
        on_finish: Callable[[Group], None] = lambda group: None,
        on_misfit: Callable[[DoesNotFit], None] | None = None,
    ) -> None:
        """Run ``groups`` to their end within ``share``.

        Args:
            groups: read one at a time, as there is room.
            on_finish: called with each group that ends, before its blocks are freed.
            on_misfit: called for a group that does not fit even alone; without it :class:`DoesNotFit` is raised.
        """
        scheduler = Scheduler(share, groups, self.options.max_num_seqs, self.options.max_num_batched_tokens)
        stash: dict[Row, torch.Tensor] = {}
        try:
            while True:
                try:
                    plan = scheduler.schedule()
                except DoesNotFit as misfit:
                    if on_misfit is None:
                        raise
                    on_misfit(misfit)
                    continue
                if not plan:
                    break
                self._step(plan, scheduler.running, stash)
                for group in scheduler.running:
                    if group.finished:
                        on_finish(group)
        finally:
            self.counters["preemptions"] += scheduler.preemptions
            scheduler.close()

    def _step(self, plan: list[tuple[Row, int]], running: list[Group], stash: dict[Row, torch.Tensor]) -> None:
        """One forward, and a token for each group whose rows all have their logits."""
        assert self.pool is not None
        ready = [row for row, tokens in plan if tokens == row.pending]
        with self.lock:
            logits = self.runner.run(self.pool, plan)
        self.counters["steps"] += 1
        self.counters["tokens_computed"] += sum(tokens for _, tokens in plan)
        index = {row: i for i, row in enumerate(ready)}
        greedy = [group for group in running if group.greedy]
        best = logits.argmax(-1).tolist() if greedy and ready else []
        for group in running:
            active = group.active
            if group.greedy:
                if all(row in index for row in active):
                    group.accept([best[index[row]] for row in active])
            elif active and all(row in index for row in active):
                group.advance(_select(logits, [index[row] for row in active]))
            else:
                self._stash(group, active, logits, index, stash)

    def _stash(
        self,
        group: Group,
        active: list[Row],
        logits: torch.Tensor,
        index: dict[Row, int],
        stash: dict[Row, torch.Tensor],
    ) -> None:
        """Keep logits until the last row of a group, whose prompts took several steps, has its own."""
        for row in active:
            if row in index:
                stash[row] = logits[index[row]].clone()
        if active and all(row in stash for row in active):
            group.advance(torch.stack([stash.pop(row) for row in active]))


def _select(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """``logits[rows]``, as a view where the rows lie one behind the other."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits[torch.tensor(rows, device=logits.device)]
