"""Every knob of :func:`fastgen.patch`, in one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

ATTENTION_BACKENDS = ("auto", "sdpa")


@dataclass(frozen=True)
class Options:
    """Options of one patched model. Names follow vLLM's where it has one."""

    block_size: int = 16
    """Tokens per cache block. A row wastes less than one block."""

    num_blocks: int | None = None
    """Blocks in the pool; ``None`` sizes it by the memory that is free at the first call."""

    gpu_memory_utilization: float = 0.9
    """Share of the free accelerator memory that the pool may take when ``num_blocks`` is ``None``."""

    cpu_memory_utilization: float = 0.25
    """The same for models on a CPU, of the memory the process may still use (cgroup limits included). The pool
    reserves address space only: a page becomes resident when a token is first written to it."""

    max_num_seqs: int = 256
    """Rows that run at the same time. The rows of one ``generate`` call are never split by it."""

    max_num_batched_tokens: int = 2048
    """Prompt tokens per forward; longer prompts run in chunks, between the steps of the rows that already decode."""

    attn_implementation: str = "auto"
    """Attention backend: ``"auto"`` picks the best there is, a name forces it."""

    verify: bool = True
    """Compare the logits of both paths on a short probe when patching, and stay on the original path if they differ."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            self._check(name, _is_int(getattr(self, name)) and getattr(self, name) >= 1, "an integer of at least 1")
        self._check(
            "num_blocks",
            self.num_blocks is None or (_is_int(self.num_blocks) and self.num_blocks >= 1),
            "None or an integer of at least 1",
        )
        for name in ("gpu_memory_utilization", "cpu_memory_utilization"):
            value = getattr(self, name)
            self._check(name, isinstance(value, int | float) and 0 < value <= 1, "a number above 0 and up to 1")
        self._check("attn_implementation", self.attn_implementation in ATTENTION_BACKENDS, f"{ATTENTION_BACKENDS}")
        self._check("verify", isinstance(self.verify, bool), "True or False")

    def _check(self, name: str, valid: bool, allowed: str) -> None:
        if not valid:
            raise ValueError(f"fastgen: {name}={getattr(self, name)!r} is not valid; allowed: {allowed}")

    @classmethod
    def of(cls, options: dict[str, Any]) -> Options:
        """Options from keyword arguments.

        Raises:
            TypeError: an unknown option, named with its value and the options there are.
            ValueError: a value out of range, named with what is allowed.
        """
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"fastgen: unknown option {name}={value!r}; allowed: {', '.join(known)}")
        return cls(**options)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
