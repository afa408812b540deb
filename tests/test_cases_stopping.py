"""Public bug reports about stopping and length (A5-A8)."""

import pytest
import torch
from support import (
    BOS,
    StopRows,
    assert_same,
    assert_same_error,
    assert_same_logs,
    batch,
    continuation,
    prompts,
    unique_token,
)
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

UNUSED = 3


@pytest.mark.parametrize("eos", [None, UNUSED])
def test_a_criterion_stops_rows_one_by_one(llama: PreTrainedModel, eos: int | None) -> None:
    """A5 (unslothai/unsloth#11039): with an eos the stopped rows are padded, without one they go on."""
    made: list[StopRows] = []

    def call() -> dict:
        made.append(StopRows(9 + 12, 9 + 5, 9 + 8))
        more = {} if eos is None else {"eos_token_id": eos}
        return {**batch(4, 9, 6), "max_new_tokens": 30, "stopping_criteria": [made[-1]], **more}

    sequences = assert_same(llama, call)
    assert_same_logs(made)
    assert sequences.shape[1] == 9 + 12
    padded = (sequences[:, 9:] == 0).sum(1).tolist()
    assert padded == ([0, 0, 0] if eos is None else [0, 7, 4])


def test_a_criterion_that_returns_one_bool_for_all(llama: PreTrainedModel) -> None:
    def stop(input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.full((3,), input_ids.shape[1] >= 16)

    sequences = assert_same(llama, {**batch(4, 9, 6), "max_new_tokens": 30, "stopping_criteria": [stop]})
    assert sequences.shape[1] == 16


def test_a_criterion_that_needs_the_scores(llama: PreTrainedModel) -> None:
    seen: list[object] = []

    def stop(input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        seen.append(None if scores is None else len(scores))  # type: ignore[arg-type]
        return torch.zeros(len(input_ids), dtype=torch.bool)

    assert_same(llama, {**batch(4, 9), "max_new_tokens": 8, "stopping_criteria": [stop]})
    assert seen == ([None] * 8) * 2 + list(range(1, 9)) * 2


@pytest.mark.parametrize("given", ["argument", "config"])
def test_stop_strings_without_a_prompt(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, given: str) -> None:
    """A6 (huggingface/transformers#31435): bos and four tokens, of which the last completes the string."""
    free = llama.generate(max_new_tokens=20)
    assert free[0, 0] == BOS
    call = {"max_new_tokens": 20, "tokenizer": tokenizer}
    strings = [tokenizer.decode(free[0, 4:5])]
    if given == "argument":
        call["stop_strings"] = strings
    else:
        call = {"generation_config": GenerationConfig(max_new_tokens=20, stop_strings=strings), "tokenizer": tokenizer}
        call["generation_config"].bos_token_id = BOS
    sequences = assert_same(llama, call, distinct=4)
    assert sequences.tolist() == free[:, :5].tolist()


def test_stop_strings_end_rows_one_by_one(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    call = {**batch(4, 9, 6), "max_new_tokens": 30}
    free = continuation(llama, call)
    strings = [tokenizer.decode(free[row, step : step + 2]) for row, step in ((0, 5), (2, 9))]
    call |= {"stop_strings": strings, "tokenizer": tokenizer, "eos_token_id": UNUSED}
    sequences = assert_same(llama, call)
    assert (sequences[:, -1] == 0).tolist() == [True, False, True]


def test_a_stop_string_completed_across_the_end_of_the_prompt(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    call = {"input_ids": torch.tensor(prompts(6)), "max_new_tokens": 20}
    first = continuation(llama, call)[0, :1]
    across = tokenizer.decode(torch.cat([call["input_ids"][0, -1:], first]))
    sequences = assert_same(llama, {**call, "stop_strings": across, "tokenizer": tokenizer}, distinct=1)
    assert sequences.shape[1] == 7


def test_stop_strings_beside_a_criterion(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Both work, and the caller's list of criteria stays as it was."""
    call = {**batch(4, 9), "max_new_tokens": 30}
    free = continuation(llama, call)
    criteria = [StopRows(9 + 15, 9 + 4)]
    call |= {
        "stop_strings": [tokenizer.decode(free[0, 8:10])],
        "tokenizer": tokenizer,
        "stopping_criteria": criteria,
        "eos_token_id": UNUSED,
    }
    sequences = assert_same(llama, call, distinct=4)
    assert sequences.shape[1] == 9 + 10
    assert len(criteria) == 1


def test_stop_strings_without_a_tokenizer_fail_alike(llama: PreTrainedModel) -> None:
    assert_same_error(llama, {**batch(4), "max_new_tokens": 5, "stop_strings": ["a"]})


@pytest.mark.parametrize("where", ["model", "argument"])
def test_a_list_of_eos(llama: PreTrainedModel, where: str) -> None:
    """A7 (huggingface/trl#7039): rows stop on either, and the pad is the first of them."""
    call = {**batch(4, 9, 6), "max_new_tokens": 30}
    free = continuation(llama, call)
    eos = [unique_token(free, 1, 5), unique_token(free, 2, 10)]
    llama.generation_config.pad_token_id = None
    if where == "model":
        llama.generation_config.eos_token_id = eos
    else:
        call["eos_token_id"] = eos
    sequences = assert_same(llama, call)
    assert sequences[1:, -1].tolist() == [eos[0], eos[0]]
    assert sequences[0, 9:].tolist() == free[0].tolist()
    assert eos[1] in sequences[2].tolist()


def test_all_rows_end_before_the_length(llama: PreTrainedModel) -> None:
    call = {**batch(4, 9), "max_new_tokens": 30}
    free = continuation(llama, call)
    eos = [unique_token(free, 0, 9), unique_token(free, 1, 5)]
    sequences = assert_same(llama, {**call, "eos_token_id": eos})
    assert 9 + 5 < sequences.shape[1] < 9 + 30


@pytest.mark.parametrize("max_length", [12, 8])
def test_a_prompt_as_long_as_the_length_fails_alike(llama: PreTrainedModel, max_length: int) -> None:
    """A8 (EleutherAI/lm-evaluation-harness#1513)."""
    error = assert_same_error(llama, {"input_ids": torch.tensor(prompts(12)), "max_length": max_length})
    assert isinstance(error, ValueError)
    assert str(max_length) in str(error)


@pytest.mark.parametrize(
    "lengths",
    [
        {"max_length": 13},
        {"max_length": 30, "min_length": 20},
        {"max_new_tokens": 1},
        {"max_length": 5, "max_new_tokens": 10},
        {},
    ],
)
def test_lengths(llama: PreTrainedModel, lengths: dict[str, int]) -> None:
    assert_same(llama, {**batch(5, 12), **lengths}, distinct=1)


def test_max_time_of_nothing(llama: PreTrainedModel) -> None:
    """A time limit that has passed when the first token is there."""
    sequences = assert_same(llama, {**batch(5, 12), "max_new_tokens": 20, "max_time": 0.0}, distinct=1)
    assert sequences.shape[1] == 13


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_return_sequences": 2},
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"temperature": -1.0, "do_sample": True},
        {"no_such_argument": 1},
        {"attention_mask": torch.ones(1, 1, 4, 4)},
    ],
    ids=lambda wrong: next(iter(wrong)) + str(next(iter(wrong.values())))[:4],
)
def test_wrong_arguments_fail_alike(llama: PreTrainedModel, wrong: dict) -> None:
    assert_same_error(llama, {"input_ids": torch.tensor(prompts(4)), "max_new_tokens": 5, **wrong})
