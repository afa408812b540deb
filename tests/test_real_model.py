"""The real model: SmolLM2-135M-Instruct, patched, against itself un-patched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import assert_same, continuation
from transformers import PreTrainedModel, pipeline

import fastgen

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {
            "role": "user",
            "content": "Write one sentence about the sea, and one about a mountain that nobody has climbed.",
        }
    ],
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Why is the sky blue?"}],
]


@pytest.fixture(scope="module")
def real(smollm: tuple[PreTrainedModel, Any]) -> Iterator[tuple[PreTrainedModel, Any]]:
    model, tokenizer = smollm
    yield fastgen.patch(model), tokenizer
    fastgen.unpatch(model)


def encoded(tokenizer: Any) -> dict[str, torch.Tensor]:
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in CHATS]
    return dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"))


def test_a_padded_batch_of_chats(real: tuple[PreTrainedModel, Any]) -> None:
    model, tokenizer = real
    assert_same(model, {**encoded(tokenizer), "max_new_tokens": 12, "do_sample": False}, atol=2e-3)


def test_seeded_sampling(real: tuple[PreTrainedModel, Any]) -> None:
    model, tokenizer = real
    call = {**encoded(tokenizer), "max_new_tokens": 6, "do_sample": True, "top_p": 0.9, "num_return_sequences": 2}
    assert_same(model, call, seed=1, atol=2e-3)


def test_helper_with_chats(real: tuple[PreTrainedModel, Any]) -> None:
    model, tokenizer = real
    lengths = [9, 4, 6]
    results = fastgen.generate(model, CHATS, tokenizer, max_new_tokens=lengths, do_sample=False)
    for chat, length, result in zip(CHATS, lengths, results, strict=True):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text, return_tensors="pt")
        expected = continuation(model, {**inputs, "max_new_tokens": length, "do_sample": False})[0].tolist()
        assert result.token_ids == expected
    assert "capital" in results[0].text


def test_pipeline(real: tuple[PreTrainedModel, Any]) -> None:
    model, tokenizer = real
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    actual = pipe(["The sea is", "Once"], max_new_tokens=5, do_sample=False, batch_size=2)
    fastgen.unpatch(model)
    expected = pipe(["The sea is", "Once"], max_new_tokens=5, do_sample=False, batch_size=2)
    fastgen.patch(model)
    assert actual == expected


def test_prompts_of_hundreds_of_tokens(real: tuple[PreTrainedModel, Any]) -> None:
    """Longer than one step's token budget is for a chunk, beside a short one."""
    model, _ = real
    fastgen.patch(model, max_num_batched_tokens=100)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 40000, (2, 220), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :210] = 0
    try:
        assert_same(model, {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4}, atol=2e-3, distinct=2)
    finally:
        fastgen.patch(model)


def test_bfloat16_stays_within_rounding(smollm: tuple[PreTrainedModel, Any]) -> None:
    model, tokenizer = copy.deepcopy(smollm[0]).to(torch.bfloat16), smollm[1]
    fastgen.patch(fastgen.unpatch(model))
    assert fastgen.status(model).path == "paged"
    call = {**encoded(tokenizer), "max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    expected = type(model).generate(model, **call, do_sample=False).logits[0]
    actual = model.generate(**call, do_sample=False).logits[0]
    last = fastgen.status(model).last_call
    assert last is not None
    assert last.reason == "packed", fastgen.status(model).reason
    torch.testing.assert_close(actual, expected, atol=1.0, rtol=0.05)
    assert torch.nn.functional.cosine_similarity(actual, expected).min() > 0.999
