"""What fastgen does on a model, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LastCall:
    """Which path the last ``generate`` took, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Status:
    """What fastgen does on a model."""

    path: str
    """``"paged"`` or ``"hf"``: what calls take unless they ask for something special."""
    reason: str
    last_call: LastCall | None
    attn_implementation: str | None
    block_size: int
    blocks_total: int
    """0 until the first call allocates the pool."""
    blocks_free: int
    blocks_cached: int
    pool_bytes: int
    int8: bool
    counters: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of_stock(cls) -> Status:
        """The status of a model without a patch."""
        return cls("hf", "not patched", None, None, 0, 0, 0, 0, 0, False)

    def __str__(self) -> str:
        lines = [f"fastgen: {self.path} path ({self.reason})"]
        if self.last_call is not None:
            lines.append(f"  last call   {self.last_call.path} ({self.last_call.reason})")
        lines.append(f"  attention   {self.attn_implementation or 'as configured'}")
        lines.append(
            f"  blocks      {self.blocks_total} of {self.block_size} tokens, {self.blocks_free} free, "
            f"{self.blocks_cached} cached ({self.pool_bytes / 2**20:.0f} MiB reserved)"
        )
        lines += [f"  {name:<22} {count}" for name, count in sorted(self.counters.items())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [("path", f"{self.path} ({self.reason})"), ("attention", self.attn_implementation or "as configured")]
        if self.last_call is not None:
            rows.append(("last call", f"{self.last_call.path} ({self.last_call.reason})"))
        rows.append(("blocks", f"{self.blocks_free} of {self.blocks_total} free, {self.block_size} tokens each"))
        rows += [(name, str(count)) for name, count in sorted(self.counters.items())]
        return "<table>" + "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows) + "</table>"
