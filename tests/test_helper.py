"""`fastgen.generate`: ragged prompts in, results in their order out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    assert_pool_whole,
    continuation,
    prompts,
    stock,
    tiny_llama,
    tiny_model,
)
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import fastgen

RAGGED = prompts(3, 21, 1, 9, 14, 2, 40)


def alone(model: PreTrainedModel, prompt: list[int], **arguments: Any) -> list[int]:
    """What un-patched `generate` adds to one prompt."""
    return continuation(model, {"input_ids": torch.tensor([prompt]), **arguments})[0].tolist()


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 5}, {"num_blocks": 16}])
def test_results_in_order_with_a_length_each(options: dict[str, int]) -> None:
    model = fastgen.patch(tiny_llama(), block_size=4, **options)
    lengths = [16, 3, 24, 1, 9, 12, 20]
    results = fastgen.generate(model, RAGGED, max_new_tokens=lengths)
    assert [len(result.token_ids) for result in results] == lengths
    for prompt, length, result in zip(RAGGED, lengths, results, strict=True):
        assert result.token_ids == alone(model, prompt, max_new_tokens=length)
        assert all(type(token) is int for token in result.token_ids)
        assert result.finish_reason == "length"
    assert_pool_whole(model)


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": [1.0, 1.8, 1.2, 1.0, 3.0, 1.5, 1.1]},
        {"do_sample": True, "top_k": 1},
        {"do_sample": [True, False] * 3 + [True], "top_k": 1},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [11, 12, 13]},
        {"eos_token_id": [20, 30, 40], "min_new_tokens": 4},
        {"max_length": 45, "max_new_tokens": None},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_generation_arguments(llama: PreTrainedModel, arguments: dict[str, Any]) -> None:
    arguments = {"max_new_tokens": 12, **arguments}
    results = fastgen.generate(llama, RAGGED, **arguments)
    natural = {"suppress_tokens", "eos_token_id"}
    for index, (prompt, result) in enumerate(zip(RAGGED, results, strict=True)):
        own = {
            name: value[index] if isinstance(value, list) and name not in natural else value
            for name, value in arguments.items()
        }
        assert result.token_ids == alone(llama, prompt, **own)


def test_seeded_sampling(llama: PreTrainedModel) -> None:
    """The same for the same seed, whatever else is in the batch, and other for another."""
    call = {"do_sample": True, "max_new_tokens": 12}
    results = [result.token_ids for result in fastgen.generate(llama, RAGGED, seed=3, **call)]
    assert results == [result.token_ids for result in fastgen.generate(llama, RAGGED, seed=3, **call)]
    assert results[:2] == [result.token_ids for result in fastgen.generate(llama, RAGGED[:2], seed=3, **call)]
    assert results != [result.token_ids for result in fastgen.generate(llama, RAGGED, seed=4, **call)]
    for index, prompt in enumerate(RAGGED):
        expected = continuation(llama, {"input_ids": torch.tensor([prompt]), **call}, seed=3 + index)
        assert results[index] == expected[0].tolist()


def test_several_sequences_a_prompt(llama: PreTrainedModel) -> None:
    results = fastgen.generate(llama, RAGGED, do_sample=True, num_return_sequences=2, max_new_tokens=8, seed=0)
    assert len(results) == 2 * len(RAGGED)
    assert any(results[i].token_ids != results[i + 1].token_ids for i in range(0, len(results), 2))


def test_finish_reasons(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    free = [alone(llama, prompt, max_new_tokens=16) for prompt in RAGGED[:3]]
    eos = next(token for token in free[0][3:] if all(token not in other for other in free[1:]))
    string = tokenizer.decode(free[1][5:7])
    arguments = {"max_new_tokens": 16, "eos_token_id": eos}
    results = fastgen.generate(llama, RAGGED[:3], tokenizer, stop_strings=[string], **arguments)
    assert [result.finish_reason for result in results] == ["eos", "stop", "length"]
    assert results[0].token_ids == free[0][: free[0].index(eos) + 1]
    assert results[1].token_ids[-1] == free[1][6] or string in results[1].text
    assert len(results[1].token_ids) < 16
    assert results[2].token_ids == free[2]
    for prompt, result in zip(RAGGED, results, strict=False):
        own = alone(llama, prompt, stop_strings=[string], tokenizer=tokenizer, **arguments)
        assert result.token_ids == own


def test_eos_of_the_model(llama: PreTrainedModel) -> None:
    free = alone(llama, RAGGED[0], max_new_tokens=16)
    llama.generation_config.eos_token_id = free[6]
    result = fastgen.generate(llama, [RAGGED[0]], max_new_tokens=16)[0]
    assert result.token_ids == free[: free.index(free[6]) + 1]
    assert result.finish_reason == "eos"


def test_kinds_of_prompts(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    text = "the quick brown fox"
    chat = [{"role": "user", "content": "when does the baker sell bread?"}]
    templated = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    encoded = tokenizer(templated).input_ids
    asked: list[Any] = [text, RAGGED[0], chat, torch.tensor(RAGGED[1]), tuple(RAGGED[2])]
    ids = [tokenizer(text).input_ids, RAGGED[0], encoded, RAGGED[1], RAGGED[2]]
    results = fastgen.generate(llama, asked, tokenizer, max_new_tokens=10)
    for prompt, result in zip(ids, results, strict=True):
        assert result.token_ids == alone(llama, prompt, max_new_tokens=10)
        assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
    for one in (text, chat, RAGGED[0]):
        assert len(fastgen.generate(llama, one, tokenizer, max_new_tokens=4)) == 1


def test_no_prompts(llama: PreTrainedModel) -> None:
    assert fastgen.generate(llama, [], max_new_tokens=4) == []


def test_without_a_tokenizer(llama: PreTrainedModel) -> None:
    assert fastgen.generate(llama, [RAGGED[0]], max_new_tokens=4)[0].text in (None, "")
    with pytest.raises((TypeError, ValueError), match="tokenizer"):
        fastgen.generate(llama, ["the quick brown fox"], max_new_tokens=4)


def test_wrong_arguments(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens.*2.*7|max_new_tokens.*7.*2"):
        fastgen.generate(llama, RAGGED, max_new_tokens=[3, 4])
    with pytest.raises((TypeError, ValueError), match="no_such_argument"):
        fastgen.generate(llama, RAGGED, no_such_argument=1)
    with pytest.raises(TypeError):
        fastgen.generate(llama, [3.5], max_new_tokens=2)  # type: ignore[list-item]
    assert_pool_whole(llama)
    assert len(fastgen.generate(llama, RAGGED, max_new_tokens=2)) == len(RAGGED)


def test_a_processor_that_fails_in_the_middle(llama: PreTrainedModel) -> None:
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 24:
            raise RuntimeError("a processor of the user's fails")
        return scores

    with pytest.raises(RuntimeError, match="of the user's"):
        fastgen.generate(llama, RAGGED, max_new_tokens=6, logits_processor=[fail])
    assert_pool_whole(llama)
    assert fastgen.generate(llama, [RAGGED[0]], max_new_tokens=6)[0].token_ids == alone(
        llama, RAGGED[0], max_new_tokens=6
    )


def test_a_model_that_is_not_patched() -> None:
    model = tiny_llama()
    results = fastgen.generate(model, RAGGED, max_new_tokens=8)
    for prompt, result in zip(RAGGED, results, strict=True):
        assert result.token_ids == alone(model, prompt, max_new_tokens=8)
    assert model.generate(torch.tensor(RAGGED[:1])).shape[1] > 3


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}, {"use_cache": False}])
def test_what_must_take_the_original_path(arguments: dict[str, Any]) -> None:
    model = fastgen.patch(tiny_model("llama" if arguments else "mamba"), block_size=4)
    call = {"max_new_tokens": 8, "eos_token_id": 7, **arguments}
    results = fastgen.generate(model, RAGGED[:4], **call)
    for prompt, result in zip(RAGGED, results, strict=False):
        assert result.token_ids == alone(model, prompt, **call)
    assert fastgen.status(model).last_call.path == "hf"


def test_a_prompt_larger_than_the_pool_among_others() -> None:
    model = fastgen.patch(tiny_llama(), block_size=4, num_blocks=8)
    results = fastgen.generate(model, RAGGED, max_new_tokens=8)
    for prompt, result in zip(RAGGED, results, strict=True):
        assert result.token_ids == alone(model, prompt, max_new_tokens=8)
    assert_pool_whole(model)


def test_a_name_instead_of_a_model(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = fastgen.generate(str(tmp_path), ["the quick brown fox"], max_new_tokens=8)[0]
    assert result.token_ids == alone(model, tokenizer("the quick brown fox").input_ids, max_new_tokens=8)
    assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert fastgen.generate(tmp_path, ["the quick brown fox"], max_new_tokens=8)[0] == result


def test_a_progress_bar_on_request(llama: PreTrainedModel, capfd: pytest.CaptureFixture[str]) -> None:
    fastgen.generate(llama, RAGGED, max_new_tokens=4)
    assert capfd.readouterr().err == ""
    fastgen.generate(llama, RAGGED, max_new_tokens=4, progress=True)
    assert "7/7" in capfd.readouterr().err


def test_prompts_stay_as_they_were(llama: PreTrainedModel) -> None:
    asked = [list(prompt) for prompt in RAGGED]
    fastgen.generate(llama, asked, max_new_tokens=4)
    assert asked == RAGGED


def test_nothing_needs_grad_and_training_mode_stays(llama: PreTrainedModel) -> None:
    llama.train()
    results = fastgen.generate(llama, RAGGED, max_new_tokens=4)
    assert llama.training
    llama.eval()
    assert results == fastgen.generate(llama, RAGGED, max_new_tokens=4)
    assert stock(llama)(torch.tensor(RAGGED[:1]), max_new_tokens=4)[0, 3:].tolist() == results[0].token_ids
