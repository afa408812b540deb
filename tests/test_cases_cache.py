"""Public bug reports about caches, architectures and the pool (A14-A19, A21)."""

from typing import Any

import pytest
import torch
from support import (
    CACHE,
    Recorder,
    assert_outputs_close,
    assert_path,
    assert_pool_whole,
    assert_same,
    assert_same_error,
    batch,
    continuation,
    left_pad,
    prompts,
    stock,
    tiny_llama,
    tiny_model,
    unique_token,
)
from transformers import DynamicCache, PreTrainedModel

import fastgen


def turns(generate: Any, cache_name: str = CACHE) -> tuple[list[Any], list[int]]:
    """A first turn whose cache is returned, and a second one with seven new tokens on top."""
    ids = torch.tensor(prompts(9))
    wanted = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 10}
    first = generate(ids, **wanted)
    cache = first[cache_name]
    lengths = [cache.get_seq_length()]
    ids = torch.cat([first.sequences, torch.tensor(prompts(7, seed=5))], dim=1)
    second = generate(ids, **{cache_name: cache}, **wanted)
    lengths += [cache.get_seq_length(), second[cache_name].get_seq_length()]
    assert second[cache_name] is cache
    return [first.sequences, first.logits, second.sequences, second.logits], lengths


def test_a_second_turn_on_the_returned_cache(llama: PreTrainedModel) -> None:
    """A14 (unslothai/unsloth#4232)."""
    expected, lengths = turns(stock(llama))
    assert lengths == [18, 35, 35]
    actual, own_lengths = turns(llama.generate)
    assert_path(llama, "hf")
    assert own_lengths == lengths
    assert_outputs_close(tuple(expected), tuple(actual))


def test_a_returned_cache_holds_what_the_original_holds(llama: PreTrainedModel) -> None:
    """Keys and values of every token that is not a pad; pads are masked in any later use."""
    call = {**batch(4, 9), "max_new_tokens": 10, "return_dict_in_generate": True}
    expected, actual = stock(llama)(**call)[CACHE], llama.generate(**call)[CACHE]
    assert_path(llama, "paged")
    assert type(actual) is type(expected)
    seen = torch.cat([call["attention_mask"], torch.ones(2, 9)], dim=1).bool()
    for one, other in zip(expected.layers, actual.layers, strict=True):
        for name in ("keys", "values"):
            one_part, other_part = getattr(one, name), getattr(other, name)
            assert one_part.shape == other_part.shape
            torch.testing.assert_close(other_part.transpose(1, 2)[seen], one_part.transpose(1, 2)[seen])


def test_a_returned_cache_outlives_later_calls(llama: PreTrainedModel) -> None:
    call = {**batch(4, 9), "max_new_tokens": 10, "return_dict_in_generate": True}
    cache = llama.generate(**call)[CACHE]
    before = [layer.keys.clone() for layer in cache.layers]
    llama.generate(**batch(9, 9, 9, seed=3), max_new_tokens=30)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_an_empty_cache_of_the_user_is_filled(llama: PreTrainedModel) -> None:
    caches: list[DynamicCache] = []

    def call() -> dict[str, Any]:
        caches.append(DynamicCache(config=llama.config))
        return {**batch(4, 9), "max_new_tokens": 10, CACHE: caches[-1]}

    assert_same(llama, call, path="hf")
    assert [cache.get_seq_length() for cache in caches] == [18] * 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"num_beams": 3, "num_return_sequences": 3},
        {"prefill_chunk_size": 4},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_settings_that_keep_the_original_loop(llama: PreTrainedModel, arguments: dict[str, Any]) -> None:
    lengths = (9,) if "prompt_lookup_num_tokens" in arguments else (9, 4)
    call = {**batch(*lengths), "max_new_tokens": 12, **arguments}
    if "prefill_chunk_size" in arguments:
        call = {**batch(8, 8), "max_new_tokens": 12, **arguments}
    assert_same(llama, call, path="hf", distinct=3)


def test_an_assistant_model(llama: PreTrainedModel) -> None:
    call = {**batch(9), "max_new_tokens": 12, "assistant_model": tiny_llama(seed=1)}
    expected, actual = stock(llama)(**call), llama.generate(**call)
    assert_path(llama, "hf")
    assert actual.tolist() == expected.tolist()


def test_embeddings_as_inputs(llama: PreTrainedModel) -> None:
    inputs = batch(4, 9)
    embeds = llama.get_input_embeddings()(inputs["input_ids"]).detach()
    call = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"], "max_new_tokens": 12}
    assert_same(llama, call, path="hf")


def test_heads_wider_than_the_hidden_size() -> None:
    """A15 (deepspeedai/DeepSpeed#8389)."""
    model = fastgen.patch(tiny_model("qwen3", seed=1, head_dim=32), block_size=4)
    assert_same(model, {**batch(5, 11, 3, seed=1), "max_new_tokens": 20})


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("lengths", [(40, 5), (15, 16, 17), (3,)])
def test_a_sliding_window(lengths: tuple[int, ...], block_size: int) -> None:
    """A16 (huggingface/transformers#38046): lengths on both sides of the window, and across it while decoding."""
    shape: dict[str, Any] = {"head_dim": 16, "attn_implementation": "eager"}
    model = fastgen.patch(tiny_model("gemma2", **shape, sliding_window=16), block_size=block_size)
    call = {**batch(*lengths), "max_new_tokens": 24}
    sequences = assert_same(model, call)
    wide = tiny_model("gemma2", **shape, sliding_window=512)
    if max(lengths) > 3:
        assert sequences.tolist() != stock(wide)(**call).tolist()


def test_a_softcap_under_the_default_attention() -> None:
    """A16 again: transformers 5.17 takes sdpa for Gemma2, which ignores its softcap."""
    model = fastgen.patch(tiny_model("gemma2", head_dim=16, sliding_window=16, attn_logit_softcapping=2.0))
    assert_same(model, {**batch(40, 5), "max_new_tokens": 12}, path=None)


@pytest.mark.parametrize("kind", ["mamba", "llama"])
@pytest.mark.parametrize("beams", [1, 3])
def test_recurrent_models_and_beams(kind: str, beams: int) -> None:
    """A17 (huggingface/transformers#46612)."""
    model = fastgen.patch(tiny_model(kind))
    call = {**batch(6, 6), "max_new_tokens": 12, "num_beams": beams, "num_return_sequences": beams}
    assert_same(model, call, path="paged" if (kind, beams) == ("llama", 1) else "hf", distinct=3)


@pytest.mark.parametrize("lengths", [(16,), (32,), (16, 32), (15, 17)])
def test_prompts_of_exactly_k_blocks_twice(lengths: tuple[int, ...]) -> None:
    """A18 (GeeeekExplorer/nano-vllm#144)."""
    model = fastgen.patch(tiny_llama(), block_size=16)
    call = {**batch(*lengths), "max_new_tokens": 18}
    assert assert_same(model, call).tolist() == assert_same(model, call).tolist()


def sharing_rows() -> list[list[int]]:
    """Eight prompts that share their first two blocks of four tokens."""
    return [prompts(8)[0] + row for row in prompts(1, 4, 2, 3, 6, 5, 3, 7, seed=9)]


@pytest.mark.parametrize("num_blocks", [8, 13, 40])
def test_rows_that_share_blocks_in_a_tiny_pool(num_blocks: int) -> None:
    """A19 (GeeeekExplorer/nano-vllm#211): the largest row fills 8 blocks; all eight need 56."""
    model = fastgen.patch(tiny_llama(), block_size=4, num_blocks=num_blocks)
    for _ in range(2):
        assert_same(model, {**left_pad(sharing_rows()), "max_new_tokens": 17}, dict_path="hf")
    status = fastgen.status(model)
    assert status.blocks_total == num_blocks


def test_ends_of_rows_in_a_tiny_pool() -> None:
    """Rows that end early, in waves: the others' pads and the batch's length are as if all had run together."""
    model = fastgen.patch(tiny_llama(), block_size=4, num_blocks=12)
    call = {**left_pad(sharing_rows()), "max_new_tokens": 24}
    free = continuation(model, call)
    eos = [unique_token(free, row, step) for row, step in ((0, 3), (4, 8))]
    assert_same(model, {**call, "eos_token_id": eos}, dict_path="hf", distinct=3)
    every = [row[step].item() for row, step in zip(free, (3, 5, 2, 8, 9, 4, 10, 1), strict=True)]
    sequences = assert_same(model, {**call, "eos_token_id": every}, dict_path="hf", distinct=1)
    assert sequences.shape[1] < 15 + 24


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 10},
        {"sequence_bias": {(20,): 3.0, (21, 22): 5.0}},
        {"exponential_decay_length_penalty": (4, 1.5)},
        {"bad_words_ids": [[20], [30, 40]], "suppress_tokens": [11]},
        {"do_sample": True, "top_p": 0.9},
        {"num_return_sequences": 2, "do_sample": True},
        {"guidance_scale": 1.5},
        {"prefix_allowed_tokens_fn": lambda batch_id, ids: list(range(10 + batch_id * 20, 40 + batch_id * 20))},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_arguments_in_a_tiny_pool(arguments: dict[str, Any]) -> None:
    model = fastgen.patch(tiny_llama(), block_size=4, num_blocks=12)
    call = {**left_pad(sharing_rows()), "max_new_tokens": 20, "eos_token_id": 9, **arguments}
    sampled = "do_sample" in arguments
    assert_same(model, call, path="hf" if sampled else None, dict_path="hf", distinct=3)


def test_processors_of_the_user_in_a_tiny_pool() -> None:
    """They see all rows at once, so such a call cannot run in waves."""
    recorders: list[Recorder] = []

    def call() -> dict[str, Any]:
        recorders.append(Recorder(damped=12))
        return {**left_pad(sharing_rows()), "max_new_tokens": 20, "logits_processor": [recorders[-1]]}

    model = fastgen.patch(tiny_llama(), block_size=4, num_blocks=12)
    assert_same(model, call, path="hf")
    assert_outputs_close(tuple(recorders[0].log), tuple(recorders[1].log))


@pytest.mark.parametrize("lengths", [(21,), (21, 9), (2, 21)])
def test_prompts_longer_than_a_step(lengths: tuple[int, ...]) -> None:
    """They run in chunks; in some steps no row is ready for a token."""
    model = fastgen.patch(tiny_llama(), block_size=4, max_num_batched_tokens=4)
    assert_same(model, {**batch(*lengths), "max_new_tokens": 12})


def test_a_prompt_larger_than_the_pool() -> None:
    model = fastgen.patch(tiny_llama(), block_size=4, num_blocks=5)
    assert_same(model, {**batch(40, 3), "max_new_tokens": 12}, path="hf")
    assert_same(model, {**batch(6, 3), "max_new_tokens": 12}, dict_path="hf")


def test_the_pool_is_whole_after_errors(llama: PreTrainedModel) -> None:
    """Errors before the loop, and one out of the model in the middle of it."""
    call = {**batch(6, 3), "max_new_tokens": 12}
    assert_same(llama, call)
    assert_same_error(llama, {**call, "no_such_argument": 1})
    forwards = 0

    def fail(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards % 4 == 0:
            raise RuntimeError("out of memory, say")

    handle = llama.model.layers[1].register_forward_hook(fail)
    assert_same_error(llama, call)
    handle.remove()
    assert llama.config._attn_implementation == "sdpa"
    assert_pool_whole(llama)
    assert_same(llama, call)


def count_forwards(model: PreTrainedModel) -> list[int]:
    """Tokens of each forward from now on."""
    sizes: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    return sizes


def test_a_long_answer_is_not_held_up_by_new_prompts() -> None:
    """A21 (sgl-project/sglang#32549): while it decodes, prompts come and go beside it, within the token budget."""
    model = fastgen.patch(tiny_llama(), block_size=4, max_num_seqs=3, max_num_batched_tokens=16)
    short = prompts(*[24] * 30)
    asked = prompts(5, seed=4) + short
    lengths = [60] + [3] * 30
    sizes = count_forwards(model)
    results = fastgen.generate(model, asked, max_new_tokens=lengths)
    total = len(sizes)
    assert max(sizes) <= 16 + 3
    assert total <= 60 + 30, "short prompts and the long answer must share forwards"
    for prompt, length, result in zip(asked, lengths, results, strict=True):
        expected = continuation(model, {"input_ids": torch.tensor([prompt]), "max_new_tokens": length})[0]
        assert result.token_ids == expected.tolist()


def test_ended_rows_cost_no_forward(llama: PreTrainedModel) -> None:
    call = {**batch(4, 9, 6), "max_new_tokens": 30}
    call["eos_token_id"] = unique_token(continuation(llama, call), 1, 3)
    sizes = count_forwards(llama)
    llama.generate(**call)
    assert sizes[0] == 4 + 9 + 6, "pads are not computed"
    assert sizes[-1] == 2
