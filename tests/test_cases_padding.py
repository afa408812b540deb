"""Public bug reports about padding and positions (A1-A4): the fast path must do what `generate` does."""

import pytest
import torch
from support import PAD, assert_same, batch, continuation, left_pad, prompts, unique_token
from transformers import PreTrainedModel

UNUSED = 3


@pytest.mark.parametrize("ends_early", [False, True])
def test_short_rows_beside_long_ones_with_pad_as_eos(llama: PreTrainedModel, ends_early: bool) -> None:
    """A1 (unslothai/unsloth#3699)."""
    rows = prompts(2, 9)
    free = continuation(llama, {**left_pad(rows), "max_new_tokens": 30})
    eos = unique_token(free, 0, 8) if ends_early else UNUSED
    call = {**left_pad(rows, pad=eos), "max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": eos}
    sequences = assert_same(llama, call)
    alone = llama.generate(torch.tensor(rows[:1]), max_new_tokens=30, eos_token_id=eos, pad_token_id=eos)
    assert sequences[0, 9 : 9 + alone.shape[1] - 2].tolist() == alone[0, 2:].tolist()
    assert (sequences[0, -1] == eos) == ends_early


@pytest.mark.parametrize("inside", [False, True])
def test_pads_without_a_mask_are_attended_where_pad_is_eos(llama: PreTrainedModel, inside: bool) -> None:
    """A2 (huggingface/transformers#31261)."""
    rows = prompts(3, 8)
    if inside:
        rows[1][4] = UNUSED
    padded = left_pad(rows, pad=UNUSED)
    tokens = {"max_new_tokens": 20, "eos_token_id": UNUSED, "pad_token_id": UNUSED}
    unmasked = assert_same(llama, {"input_ids": padded["input_ids"], **tokens})
    masked = assert_same(llama, {**padded, **tokens})
    assert unmasked[0].tolist() != masked[0].tolist()


@pytest.mark.parametrize("inside", [False, True])
def test_pads_without_a_mask_are_masked_where_pad_is_not_eos(llama: PreTrainedModel, inside: bool) -> None:
    """The other half of A2: here transformers makes the mask from the pads."""
    rows = prompts(3, 8)
    if inside:
        rows[1][4] = UNUSED
    ids = left_pad(rows, pad=UNUSED)["input_ids"]
    call = {"input_ids": ids, "max_new_tokens": 20, "eos_token_id": 4, "pad_token_id": UNUSED}
    assert_same(llama, call, path="hf" if inside else "paged")


def test_right_padding_continues_after_the_pads(llama: PreTrainedModel) -> None:
    """A3 (huggingface/transformers#30378)."""
    left = batch(4, 9)
    right = {
        "input_ids": torch.stack([left["input_ids"][0].roll(-5), left["input_ids"][1]]),
        "attention_mask": torch.stack([left["attention_mask"][0].roll(-5), left["attention_mask"][1]]),
    }
    assert right["input_ids"][0, 4:].tolist() == [PAD] * 5
    sequences = assert_same(llama, {**right, "max_new_tokens": 20}, path="hf")
    assert sequences[0, 9:].tolist() != continuation(llama, {**left, "max_new_tokens": 20})[0].tolist()


def test_holes_in_the_mask(llama: PreTrainedModel) -> None:
    call = batch(6, 9)
    plain = continuation(llama, {**call, "max_new_tokens": 12})
    call["attention_mask"][1, 4:6] = 0
    holed = assert_same(llama, {**call, "max_new_tokens": 12}, path="hf")
    assert holed[1, 9:].tolist() != plain[1].tolist()


def test_position_ids_of_the_user(llama: PreTrainedModel) -> None:
    """A4 (huggingface/transformers#33938)."""
    call = {"input_ids": torch.tensor(prompts(6)), "max_new_tokens": 16}
    counted = assert_same(llama, call)
    own = assert_same(llama, {**call, "position_ids": torch.tensor([[0, 0, 1, 2, 2, 2]])})
    assert own.tolist() != counted.tolist()


def test_position_ids_of_the_user_beside_padding(llama: PreTrainedModel) -> None:
    """A4 again, in a batch: odd rows get spread-out positions, and go on from their last one."""
    call = batch(4, 7, 7)
    positions = (call["attention_mask"].cumsum(1) - 1).clamp_min(0)
    positions[1] *= 3
    assert_same(llama, {**call, "position_ids": positions, "max_new_tokens": 16})


def test_one_token_prompts(llama: PreTrainedModel) -> None:
    assert_same(llama, {**batch(1, 1, 6), "max_new_tokens": 20})


def test_a_row_of_pads_alone(llama: PreTrainedModel) -> None:
    call = batch(3, 6)
    call["attention_mask"][0] = 0
    assert_same(llama, {**call, "max_new_tokens": 10}, path="hf", distinct=1)


def test_mask_of_other_types(llama: PreTrainedModel) -> None:
    call = {**batch(3, 8), "max_new_tokens": 12}
    expected = assert_same(llama, call)
    mask = call.pop("attention_mask")
    for dtype in (torch.bool, torch.int32, torch.float32):
        sequences = assert_same(llama, {**call, "attention_mask": mask.to(dtype)}, path=None)
        assert sequences.tolist() == expected.tolist()
