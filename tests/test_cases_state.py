"""Public bug reports about what a call leaves behind (A22-A26)."""

import copy
import threading
from typing import Any

import pytest
import torch
from support import (
    Raising,
    Recorder,
    StopRows,
    assert_path,
    assert_pool_whole,
    assert_same,
    assert_same_error,
    batch,
    prompts,
    stock,
    tiny_llama,
)
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, TextIteratorStreamer

import fastgen


def train_step(model: PreTrainedModel, rate: float = 0.05) -> float:
    """One step of gradient descent on two rows; returns the loss."""
    inputs = batch(12, 8, seed=7)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
    model.zero_grad()
    return float(loss)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_generate_train_generate(implementation: str) -> None:
    """A22 (huggingface/transformers#45943): the attention is the model's own again after each call."""
    model = fastgen.patch(tiny_llama(attn_implementation=implementation), block_size=4)
    twin = tiny_llama(attn_implementation=implementation)
    call = {**batch(4, 9), "max_new_tokens": 16}
    first = assert_same(model, call)
    for _ in range(2):
        assert model.config._attn_implementation == implementation
        assert type(model.config._attn_implementation) is str
        model.train()
        assert train_step(model) == pytest.approx(train_step(twin), abs=1e-6)
        model.eval()
        sequences = assert_same(model, call)
        assert sequences.tolist() == twin.generate(**call).tolist()
        assert sequences.tolist() != first.tolist()


def test_the_attention_is_back_after_an_error(llama: PreTrainedModel) -> None:
    """The other half of A22."""
    call = {**batch(4, 9), "max_new_tokens": 16}
    assert_same_error(llama, lambda: {**call, "logits_processor": [Raising(3)]})
    assert llama.config._attn_implementation == "sdpa"
    inputs = batch(12, 8, seed=7)
    torch.testing.assert_close(llama(**inputs).logits, tiny_llama()(**inputs).logits, rtol=0, atol=0)
    assert_same(llama, call)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_generate_in_training_mode(checkpointing: bool) -> None:
    """A23 (huggingface/transformers#36051)."""
    model = fastgen.patch(tiny_llama(), block_size=4)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    assert_same(model, {**batch(4, 9), "max_new_tokens": 16}, path=None)
    assert model.training
    assert all(module.training for module in model.modules())
    assert model.is_gradient_checkpointing == checkpointing
    assert train_step(model) > 0


@pytest.mark.parametrize("path", ["paged", "hf"])
def test_arguments_and_configs_stay_as_they_were(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: str
) -> None:
    """A24 (unslothai/unsloth#3283)."""
    inputs = batch(4, 9)
    own = GenerationConfig(max_new_tokens=12, stop_strings=["zzzz"], pad_token_id=0, bos_token_id=1, eos_token_id=3)
    call = {
        **inputs,
        "generation_config": own,
        "logits_processor": [Recorder()],
        "stopping_criteria": [StopRows(40, 40)],
        "tokenizer": tokenizer,
        "use_cache": path == "paged",
    }
    kept = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    lists = {name: list(call[name]) for name in ("logits_processor", "stopping_criteria")}
    before = (llama.config.to_dict(), llama.generation_config.to_dict(), own.to_dict(), vars(own).copy())
    size, template, attributes = len(tokenizer), tokenizer.chat_template, set(vars(tokenizer))
    llama.generate(**call)
    assert_path(llama, path)
    assert before == (llama.config.to_dict(), llama.generation_config.to_dict(), own.to_dict(), vars(own))
    assert (size, template, attributes) == (len(tokenizer), tokenizer.chat_template, set(vars(tokenizer)))
    assert call.keys() == kept.keys()
    assert all(call[name] == items for name, items in lists.items())
    for name, value in kept.items():
        assert torch.equal(call[name], value) if isinstance(value, torch.Tensor) else call[name] is value


def test_a_copy_uses_its_own_weights(llama: PreTrainedModel) -> None:
    """A25 (huggingface/accelerate#1835)."""
    call = {**batch(4, 9), "max_new_tokens": 16}
    first = assert_same(llama, call)
    twin = copy.deepcopy(llama)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.2).add_(0.03)
    changed = assert_same(twin, call)
    assert changed.tolist() != first.tolist()
    assert assert_same(llama, call).tolist() == first.tolist()
    assert assert_same(twin, call).tolist() == changed.tolist()
    calls = fastgen.status(llama).counters
    twin.generate(**call)
    assert fastgen.status(llama).counters == calls
    fastgen.unpatch(llama)
    assert assert_same(twin, call).tolist() == changed.tolist()
    assert llama.generate(**call).tolist() == first.tolist()


def test_a_processor_fails_while_a_streamer_is_read(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """A26 (huggingface/transformers#22576): the caller gets the error, and the reader is let go."""
    call = {"input_ids": torch.tensor(prompts(6)), "max_new_tokens": 16}
    expected = assert_same(llama, call)
    streamer = TextIteratorStreamer(tokenizer, timeout=30)
    raised: list[Exception] = []

    def run() -> None:
        try:
            llama.generate(**call, streamer=streamer, logits_processor=[Raising(3)])
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    text = "".join(streamer)
    thread.join(30)
    assert not thread.is_alive()
    assert [str(error) for error in raised] == ["a processor of the user's fails"]
    assert text.startswith(tokenizer.decode(expected[0, :6])[:6])
    assert_pool_whole(llama)
    assert assert_same(llama, call).tolist() == expected.tolist()


def test_a_streamer_that_fails(llama: PreTrainedModel) -> None:
    class Failing:
        puts = 0

        def put(self, value: Any) -> None:
            self.puts += 1
            if self.puts == 3:
                raise RuntimeError("the connection is gone")

        def end(self) -> None:
            pass

    call = {"input_ids": torch.tensor(prompts(6)), "max_new_tokens": 16}
    assert_same_error(llama, lambda: {**call, "streamer": Failing()})
    assert_same(llama, call)


def test_an_interrupt_leaves_the_pool_whole(llama: PreTrainedModel) -> None:
    def interrupt(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    call = {**batch(4, 9), "max_new_tokens": 16}
    with pytest.raises(KeyboardInterrupt):
        llama.generate(**call, logits_processor=[interrupt])
    assert_pool_whole(llama)
    assert llama.generate(**call).tolist() == stock(llama)(**call).tolist()
