"""What a fresh pair of eyes broke: each fault found by attack, and its kind."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
from support import assert_same, assert_same_error, batch, continuation, prompts, stock, tiny_llama, tiny_model
from transformers import EosTokenCriteria, GenerationConfig, LlamaForCausalLM, MaxLengthCriteria

import fastgen
from fastgen.attention.hook import AttentionSwitch, RecordingStep

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def llama() -> Any:
    return fastgen.patch(tiny_llama())


@pytest.mark.parametrize("limit", [0, 1, 5, 7])
def test_a_length_criterion_that_the_prompt_has_passed(llama: Any, limit: int) -> None:
    call = {**batch(7, 3, 5), **GREEDY}
    assert_same(llama, lambda: {**call, "stopping_criteria": [MaxLengthCriteria(limit)]}, distinct=1)


@pytest.mark.parametrize(
    "input_ids", [torch.zeros(0, 5, dtype=torch.long), torch.randint(5, 90, (2, 5), dtype=torch.int16)]
)
def test_inputs_that_the_original_refuses(llama: Any, input_ids: torch.Tensor) -> None:
    assert_same_error(llama, {"input_ids": input_ids, **GREEDY})


def test_stock_criteria_given_to_the_helper(llama: Any) -> None:
    rows = prompts(7, 4)
    alone = [continuation(llama, {"input_ids": torch.tensor([row]), **GREEDY})[0].tolist() for row in rows]
    eos = alone[0][3]
    first, _ = fastgen.generate(llama, rows, stopping_criteria=[EosTokenCriteria(eos)], **GREEDY)
    assert first.token_ids == alone[0][: alone[0].index(eos) + 1]
    assert first.finish_reason == "eos"
    short = fastgen.generate(llama, rows, stopping_criteria=[MaxLengthCriteria(9), MaxLengthCriteria(30)], **GREEDY)
    assert [len(result.token_ids) for result in short] == [2, 5]


@pytest.mark.parametrize(
    "argument", [{"sequence_bias": [[[5], -9.0]]}, {"forced_eos_token_id": [7]}, {"suppress_tokens": [5, 6]}]
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_arguments_that_are_lists_by_nature(llama: Any, argument: dict[str, Any], count: int) -> None:
    rows = prompts(*range(4, 4 + count))
    results = fastgen.generate(llama, rows, **argument, **GREEDY)
    for row, result in zip(rows, results, strict=True):
        expected = continuation(llama, {"input_ids": torch.tensor([row]), **argument, **GREEDY})[0].tolist()
        assert result.token_ids == expected


def test_a_config_changed_after_the_patch() -> None:
    model = fastgen.patch(tiny_model("mistral", sliding_window=None))
    call = {**batch(9, 4), "max_new_tokens": 15, "do_sample": False}
    assert_same(model, call)
    model.config.sliding_window = 4
    assert_same(model, call, path=None)


def test_a_loaded_model_patched_and_pickled_again(llama: Any) -> None:
    again = fastgen.patch(pickle.loads(pickle.dumps(llama)))
    third = pickle.loads(pickle.dumps(again))
    call = {**batch(6, 3), **GREEDY}
    assert torch.equal(third.generate(**call), stock(llama)(**call))


def test_two_models_on_one_config() -> None:
    first = tiny_llama()
    config = first.config
    second = LlamaForCausalLM(config).eval()
    name = config._attn_implementation
    ids = torch.tensor(prompts(6))
    expected = second(ids).logits
    step = RecordingStep(1)
    with AttentionSwitch(first).running(step), AttentionSwitch(second).running(step):
        seen: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: seen.append(second(ids).logits))
        thread.start()
        thread.join()
        assert torch.equal(seen[0], expected)
    assert config._attn_implementation == name
    assert type(config._attn_implementation) is str


def test_generate_from_within_a_forward(llama: Any) -> None:
    call = {**batch(6, 3), **GREEDY}
    expected = stock(llama)(**call)
    inner: list[torch.Tensor] = []

    def hook(*_: Any) -> None:
        handle.remove()
        inner.append(llama.generate(**call))

    handle = llama.register_forward_pre_hook(hook)
    outer: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outer.append(llama.generate(**call)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert torch.equal(outer[0], expected)
    assert torch.equal(inner[0], expected)


def test_a_generate_of_the_models_own_that_returns_something_else() -> None:
    model = tiny_llama()
    model.generate = lambda *args, **kwargs: "mine"
    fastgen.patch(model)
    assert fastgen.status(model).path == "hf"
    assert model.generate(**batch(4)) == "mine"
    fastgen.unpatch(model)
    assert model.generate() == "mine"


def test_a_patch_under_autocast() -> None:
    model = tiny_llama()
    with torch.autocast("cpu", torch.bfloat16):
        fastgen.patch(model)
    assert_same(model, {**batch(6, 3), **GREEDY})


def test_an_error_of_the_streamers_put_is_the_one_that_is_raised(llama: Any) -> None:
    class Broken:
        puts = 0

        def put(self, tokens: torch.Tensor) -> None:
            self.puts += 1
            if self.puts == 3:
                raise KeyError("put")

        def end(self) -> None:
            raise OSError("end")

    with pytest.raises(KeyError, match="put"):
        llama.generate(**batch(4), streamer=Broken(), **GREEDY)


def test_generation_configs_of_one_call_are_left_alone(llama: Any) -> None:
    config = GenerationConfig(**GREEDY, pad_token_id=0)
    before = config.to_dict()
    fastgen.generate(llama, prompts(5, 3), generation_config=config)
    assert config.to_dict() == before
