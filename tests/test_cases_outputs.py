"""Public bug reports about outputs, processors and sampling (A9-A13)."""

from typing import Any

import pytest
import torch
from support import (
    BOS,
    PAD,
    VOCAB,
    Recorder,
    assert_outputs_close,
    assert_same,
    assert_same_logs,
    batch,
    continuation,
    stock,
    tiny_llama,
    unique_token,
)
from transformers import GenerationConfig, PreTrainedModel

import fastgen

UNUSED = 3
NUCLEUS = {"do_sample": True, "top_p": 0.8, "temperature": 1.3, "top_k": 0}


def test_min_new_tokens_forbids_eos_in_the_scores(llama: PreTrainedModel) -> None:
    """A9 (huggingface/transformers#21321)."""
    call = {**batch(4, 9, 6), "max_new_tokens": 24}
    eos = unique_token(continuation(llama, call), 1, 3)
    call |= {"eos_token_id": eos, "min_new_tokens": 10}
    sequences = assert_same(llama, call)
    assert eos not in sequences[:, 9 : 9 + 10].tolist()[1]
    scores = llama.generate(**call, return_dict_in_generate=True, output_scores=True).scores
    assert all(step.shape == (3, VOCAB) for step in scores)
    assert all(bool((step[:, eos] == -torch.inf).all()) for step in scores[:10])
    assert not any(bool((step[:, eos] == -torch.inf).any()) for step in scores[10:])


def test_allowed_tokens_of_each_row(llama: PreTrainedModel) -> None:
    """A10 (dottxt-ai/outlines#789): a set for each batch_id, sampled, two sequences a prompt."""
    asked: list[list[tuple[int, list[int]]]] = []

    def call() -> dict[str, Any]:
        asked.append([])

        def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
            asked[-1].append((batch_id, ids.tolist()))
            return list(range(10 + batch_id * 25, 35 + batch_id * 25))

        return {
            **batch(4, 9, 6),
            "max_new_tokens": 12,
            "do_sample": True,
            "num_return_sequences": 2,
            "prefix_allowed_tokens_fn": allowed,
        }

    sequences = assert_same(llama, call)
    assert asked[0] == asked[1]
    assert asked[2] == asked[3]
    assert sequences.shape == (6, 21)
    rows_per_id = 6 // len({batch_id for batch_id, _ in asked[0]})  # 1 or 2, by the version of transformers
    for row, tokens in enumerate(sequences[:, 9:].tolist()):
        batch_id = row // rows_per_id
        assert set(tokens) <= set(range(10 + batch_id * 25, 35 + batch_id * 25))


def test_a_prefix_function_that_allows_only_eos(llama: PreTrainedModel) -> None:
    """Against `min_new_tokens`: nothing is left to choose, and newer versions force the eos."""

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        return [UNUSED] if batch_id == 0 and len(ids) >= 12 else list(range(5, VOCAB))

    call = {**batch(4, 9), "max_new_tokens": 20, "eos_token_id": UNUSED, "min_new_tokens": 15}
    sequences = assert_same(llama, {**call, "prefix_allowed_tokens_fn": allowed}, distinct=3)
    assert sequences[0, 12] in (UNUSED, 0)


@pytest.mark.parametrize("pad", [7, 150])
def test_an_ordinary_token_as_pad_under_a_penalty(llama: PreTrainedModel, pad: int) -> None:
    """A11 (huggingface/text-generation-inference#1765): or is not, from the version on that skips left pads."""
    call = {**batch(3, 9, pad=pad), "max_new_tokens": 20, "pad_token_id": pad, "repetition_penalty": 1.8}
    penalised = assert_same(llama, call)
    free = continuation(llama, {**call, "repetition_penalty": None})
    assert penalised[0, 9:].tolist() != free[0].tolist()


@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("damped", [None, 11])
def test_a_processor_that_keeps_a_log(llama: PreTrainedModel, ends_early: bool, damped: int | None) -> None:
    """A12 (epfl-dlab/transformers-CFG#49): over two calls, one call a step with all rows, in-place edits and all."""
    first, second = {**batch(4, 9, 6), "max_new_tokens": 12}, {**batch(7, 2, seed=1), "max_new_tokens": 8}
    if ends_early:
        first["eos_token_id"] = unique_token(continuation(llama, first), 1, 4)
    recorders: list[Recorder] = []

    def recorded(call: dict[str, Any], step: int) -> Any:
        """The same processor object serves the first and then the second call."""

        def make() -> dict[str, Any]:
            if step == 0:
                recorders.append(Recorder(damped))
            processor = recorders[len(uses) % 4] if step else recorders[-1]
            uses.append(processor)
            return {**call, "logits_processor": [processor]}

        uses: list[Recorder] = []
        return make

    assert_same(llama, recorded(first, 0), distinct=4)
    assert_same(llama, recorded(second, 1))
    assert all(len(recorder.log) == 12 + 8 for recorder in recorders)
    assert_same_logs(recorders)


@pytest.mark.parametrize("seed", range(4))
def test_seeded_nucleus_sampling_while_a_row_ends(llama: PreTrainedModel, seed: int) -> None:
    """A13 (huggingface/transformers#34693)."""
    call = {**batch(4, 9, 6), "max_new_tokens": 24, **NUCLEUS}
    free = continuation(llama, call, seed)
    eos = unique_token(free, 1, 3)
    sequences = assert_same(llama, {**call, "eos_token_id": eos}, seed=seed, distinct=3)
    assert sequences[1, -1] == PAD
    assert sequences[0, 9:].tolist() == free[0].tolist()


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_return_sequences": 3},
        {"top_k": 7},
        {"min_p": 0.05},
        {"typical_p": 0.7},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.01},
        {"temperature": 0.6, "repetition_penalty": 1.3},
        {"top_k": 1},
        {"renormalize_logits": True, "top_p": 0.5},
        {"remove_invalid_values": True},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_seeded_sampling(llama: PreTrainedModel, arguments: dict[str, Any]) -> None:
    assert_same(llama, {**batch(3, 8), "max_new_tokens": 16, "do_sample": True, **arguments}, seed=3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[20], [30, 40]]},
        {"suppress_tokens": [11, 12, 13]},
        {"begin_suppress_tokens": [11, 12, 13]},
        {"forced_bos_token_id": 9},
        {"forced_eos_token_id": 9},
        {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 9},
        {"sequence_bias": {(20,): 3.0, (21, 22): 5.0}},
        {"guidance_scale": 1.5},
        {"encoder_repetition_penalty": 1.3},
        {"encoder_no_repeat_ngram_size": 2},
        {"renormalize_logits": True},
        {"watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash", "greenlist_ratio": 0.25}},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_processors_of_transformers(llama: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Some keep a cache of their own or read the prompt: whichever path they take, the result is the same."""
    arguments = {**batch(3, 8), "max_new_tokens": 16, **arguments}
    assert_same(llama, arguments, path=None, distinct=3)


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"output_scores": True},
        {"output_logits": True},
        {"output_attentions": True},
        {"output_hidden_states": True},
    ],
    ids=lambda wanted: next(iter(wanted), "none"),
)
def test_returned_fields(wanted: dict[str, bool]) -> None:
    """Those asked for, and no others; attentions and hidden states come from the original."""
    model = fastgen.patch(tiny_llama(attn_implementation="eager"))
    call = {**batch(3, 8), "max_new_tokens": 6, "return_dict_in_generate": True, **wanted}
    expected, actual = stock(model)(**call), model.generate(**call)
    assert_outputs_close(expected, actual)
    internals = "output_attentions" in wanted or "output_hidden_states" in wanted
    assert fastgen.status(model).last_call.path == ("hf" if internals else "paged")


def test_flags_without_return_dict_change_nothing(llama: PreTrainedModel) -> None:
    call = {**batch(3, 8), "max_new_tokens": 6}
    expected = llama.generate(**call)
    actual = llama.generate(**call, output_scores=True, output_logits=True)
    assert isinstance(actual, torch.Tensor)
    assert actual.tolist() == expected.tolist()


def test_settings_may_come_in_a_config_or_by_position(llama: PreTrainedModel) -> None:
    inputs = batch(3, 8)
    config = GenerationConfig(max_new_tokens=9, do_sample=True, top_k=5, pad_token_id=PAD, bos_token_id=BOS)
    expected = assert_same(llama, {**inputs, "generation_config": config})
    torch.manual_seed(0)
    actual = llama.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"])
    assert actual.tolist() == expected.tolist()
    torch.manual_seed(0)
    actual = llama.generate(
        inputs=inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=config
    )
    assert actual.tolist() == expected.tolist()


def test_rows_that_ended_are_real_values_in_the_outputs(llama: PreTrainedModel) -> None:
    """They go on being computed where their scores or logits are returned."""
    call = {**batch(3, 8), "max_new_tokens": 20}
    call["eos_token_id"] = unique_token(continuation(llama, call), 0, 3)
    assert_same(llama, call, distinct=3)
    output = llama.generate(**call, return_dict_in_generate=True, output_logits=True)
    assert output.sequences[0, -1] == PAD
    assert all(step[0].std() > 0.1 for step in output.logits)


def test_logits_of_a_float64_model_are_float32() -> None:
    model = fastgen.patch(tiny_llama().double())
    call = {**batch(3, 8), "max_new_tokens": 16}
    assert_same(model, call, atol=1e-5)
    output = model.generate(**call, return_dict_in_generate=True, output_logits=True, output_scores=True)
    assert {tensor.dtype for tensor in output.logits + output.scores} == {torch.float32}
