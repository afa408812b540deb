"""A20: adapters, patched before or after the model is wrapped, and switched between calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import tiny_llama

import fastgen

TARGETS = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "r": 4}


@pytest.mark.parametrize("patch_first", [True, False])
def test_each_adapter_gives_what_it_gives_unpatched(patch_first: bool) -> None:
    model = tiny_llama()
    if patch_first:
        fastgen.patch(model)
    torch.manual_seed(0)
    wrapped: Any = get_peft_model(model, LoraConfig(**TARGETS), adapter_name="first")
    wrapped.add_adapter("second", LoraConfig(**TARGETS))
    wrapped.eval()
    if not patch_first:
        assert fastgen.patch(wrapped) is wrapped
    input_ids = torch.randint(5, 190, (2, 9))
    answers = []

    def check() -> None:
        call = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "pad_token_id": 0}
        answers.append(wrapped.generate(**call, max_new_tokens=12, do_sample=False).tolist())
        last = fastgen.status(wrapped).last_call
        assert last is not None and last.path == "paged"
        patched = model.__dict__.pop("generate")
        assert wrapped.generate(**call, max_new_tokens=12, do_sample=False).tolist() == answers[-1]
        model.generate = patched

    for name in ("first", "second"):
        wrapped.set_adapter(name)
        check()
    with wrapped.disable_adapter():
        check()
    wrapped.set_adapter("first")
    check()
    first, second, disabled, again = answers
    assert again == first
    assert first != second != disabled != first
