"""What people do around `generate`, on a patched model as on a stock one."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    CACHE,
    Recorder,
    RecordingStreamer,
    assert_outputs_close,
    assert_path,
    assert_pool_whole,
    assert_same,
    batch,
    continuation,
    prompts,
    stock,
    tiny_llama,
)
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import fastgen

CALL = {**batch(4, 9), "max_new_tokens": 12}
TEXTS = ["the quick brown", "", "a baker sells warm bread and", "never"]


# Pipelines


def both_pipelines(tokenizer: PreTrainedTokenizerFast, ask: Callable[[Any], Any]) -> tuple[Any, Any]:
    answers = []
    for model in (tiny_llama(), fastgen.patch(tiny_llama(), block_size=4)):
        model.generation_config.max_new_tokens = 12
        torch.manual_seed(0)
        answers.append(ask(pipeline("text-generation", model=model, tokenizer=tokenizer)))
    assert fastgen.status(model).counters["calls_paged"] > 0
    return answers[0], answers[1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": False},
        {"do_sample": False, "batch_size": 3},
        {"do_sample": True, "num_return_sequences": 2, "top_p": 0.9},
        {"do_sample": False, "return_full_text": False},
        {"do_sample": False, "return_tensors": True},
        {"do_sample": False, "stop_sequence": "e"},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_text_generation_pipeline(tokenizer: PreTrainedTokenizerFast, arguments: dict[str, Any]) -> None:
    texts = [text for text in TEXTS if text or "batch_size" not in arguments]
    expected, actual = both_pipelines(tokenizer, lambda pipe: pipe(texts, **arguments))
    assert actual == expected
    assert len(actual) == len(texts)


def test_pipeline_with_one_empty_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    expected, actual = both_pipelines(tokenizer, lambda pipe: pipe("", do_sample=False))
    assert actual == expected
    assert actual[0]["generated_text"]


def test_pipeline_with_chats(tokenizer: PreTrainedTokenizerFast) -> None:
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    expected, actual = both_pipelines(tokenizer, lambda pipe: pipe(chats, do_sample=False))
    assert actual == expected
    assert actual[0][0]["generated_text"][-1]["role"] == "assistant"


# Chats and caches


def chat(generate: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, cache: Any) -> list[list[int]]:
    """Four turns, each on all the tokens so far; returns the conversation after each."""
    ids = torch.empty(1, 0, dtype=torch.long)
    conversation = []
    for text in TEXTS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        ids = torch.cat([ids, tokenizer(prompt, return_tensors="pt").input_ids], dim=1)
        more = {} if cache is None else {CACHE: cache}
        ids = generate(ids, attention_mask=torch.ones_like(ids), **more, max_new_tokens=8, do_sample=False)
        conversation.append(ids[0].tolist())
    return conversation


@pytest.mark.parametrize("cached", [False, True])
def test_chat_with_growing_history(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cached: bool) -> None:
    caches = [DynamicCache(config=llama.config) if cached else None for _ in range(2)]
    expected = chat(stock(llama), tokenizer, caches[0])
    assert chat(llama.generate, tokenizer, caches[1]) == expected
    assert_path(llama, "hf" if cached else "paged")
    if cached:
        assert caches[1].get_seq_length() == caches[0].get_seq_length() > 0


# Streamers


@pytest.mark.parametrize("lengths", [(6,), (4, 9)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_streamer_gets_the_prompt_then_each_step_then_the_end(
    llama: PreTrainedModel, lengths: tuple[int, ...], do_sample: bool
) -> None:
    streamers: list[RecordingStreamer] = []

    def call() -> dict[str, Any]:
        streamers.append(RecordingStreamer())
        return {**batch(*lengths), "max_new_tokens": 10, "do_sample": do_sample, "streamer": streamers[-1]}

    sequences = assert_same(llama, call)
    for streamer in streamers:
        assert streamer.log == streamers[0].log
    log = streamers[1].log
    assert log[0] == batch(*lengths)["input_ids"].tolist()
    assert log[1:-1] == sequences[:, max(lengths) :].T.tolist()
    assert log[-1] == "end"


def test_a_text_streamer_refuses_a_batch(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="batch size 1"):
        llama.generate(**CALL, streamer=TextStreamer(tokenizer))
    assert_pool_whole(llama)


def test_a_streamer_read_in_another_thread(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    inputs = tokenizer("the quick brown fox", return_tensors="pt", return_token_type_ids=False)
    pieces = {}
    for name, generate in (("stock", stock(llama)), ("patched", llama.generate)):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
        arguments = {**inputs, "streamer": streamer, "max_new_tokens": 16}
        thread = threading.Thread(target=generate, kwargs=arguments)
        thread.start()
        pieces[name] = list(streamer)
        thread.join(30)
        assert not thread.is_alive()
    assert pieces["patched"] == pieces["stock"]
    assert len(pieces["patched"]) > 2
    assert_path(llama, "paged")


# Training loops


def gradient_step(model: PreTrainedModel, sequences: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Makes the model's own tokens likelier, as an RL step would."""
    logits = model(sequences).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_rollouts(context: Callable[[], Any], checkpointing: bool) -> None:
    """Train mode, weights that change between calls, and returned tensors that a backward can use."""
    runs = []
    for patched in (False, True):
        model = tiny_llama()
        if patched:
            fastgen.patch(model, block_size=4)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, rollouts = [], []
        for step in range(3):
            torch.manual_seed(step)
            with context():
                sequences = model.generate(**CALL, do_sample=True)
            rollouts.append(sequences.tolist())
            losses.append(gradient_step(model, sequences.clone(), optimizer))
            assert model.training
        runs.append((rollouts, losses))
    assert runs[1][0] == runs[0][0]
    assert runs[1][1] == pytest.approx(runs[0][1], rel=1e-4)


def test_a_call_in_inference_mode_does_not_spoil_later_ones(llama: PreTrainedModel) -> None:
    with torch.inference_mode():
        inside = llama.generate(**CALL)
    sequences = assert_same(llama, CALL)
    assert inside.tolist() == sequences.tolist()
    output = llama.generate(**CALL, return_dict_in_generate=True, output_logits=True)
    assert not output.logits[0].is_inference()
    weight = torch.ones(output.logits[0].shape[-1], requires_grad=True)
    (output.logits[0] * weight).sum().backward()
    llama(output.sequences, labels=output.sequences).loss.backward()
    assert all(parameter.grad is not None for parameter in llama.parameters())
    with torch.inference_mode():
        assert llama.generate(**CALL).tolist() == sequences.tolist()


def test_patching_in_inference_mode() -> None:
    with torch.inference_mode():
        model = fastgen.patch(tiny_llama(), block_size=4)
        model.generate(**CALL)
    model = fastgen.patch(tiny_llama(), block_size=4)
    with torch.inference_mode():
        model.generate(**CALL)
    assert_same(model, CALL)


def test_outputs_need_no_grad(llama: PreTrainedModel) -> None:
    output = llama.generate(**CALL, return_dict_in_generate=True, output_logits=True, output_scores=True)
    assert not any(tensor.requires_grad for tensor in output.logits + output.scores)


@pytest.mark.parametrize("how", ["in place", "data", "load_state_dict", "assign", "new parameter"])
def test_weights_change_between_calls(llama: PreTrainedModel, how: str) -> None:
    first = assert_same(llama, CALL)
    other = tiny_llama(seed=5)
    projection = llama.model.layers[0].self_attn.q_proj
    if how == "in place":
        with torch.no_grad():
            projection.weight.mul_(-1)
    elif how == "data":
        projection.weight.data = -projection.weight.data
    elif how == "new parameter":
        projection.weight = torch.nn.Parameter(-projection.weight.detach())
    else:
        llama.load_state_dict(other.state_dict(), assign=how == "assign")
    assert assert_same(llama, CALL).tolist() != first.tolist()


def test_dropout_in_training_mode() -> None:
    model = fastgen.patch(tiny_llama(attention_dropout=0.3), block_size=4)
    evaluated = assert_same(model, CALL)
    model.train()
    assert assert_same(model, CALL, path="hf").tolist() != evaluated.tolist()
    model.eval()
    assert_same(model, CALL)


# Processors and criteria of the user


def test_grammar_like_processor(llama: PreTrainedModel) -> None:
    """One call a step with every row, in-place edits of the scores, state of its own for each row."""

    class Alternate:
        def __init__(self) -> None:
            self.calls = 0
            self.odd = [False, True, False]

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert input_ids.shape == (3, 9 + self.calls)
            for row, odd in enumerate(self.odd):
                scores[row, int(not odd) :: 2] = -torch.inf
                self.odd[row] = not odd
            self.calls += 1
            return scores

    sequences = assert_same(llama, lambda: {**batch(4, 9, 6), "max_new_tokens": 12, "logits_processor": [Alternate()]})
    assert (sequences[:, 9:] % 2).tolist() == [[0, 1] * 6, [1, 0] * 6, [0, 1] * 6]


def test_a_processor_that_returns_another_dtype_or_tensor(llama: PreTrainedModel) -> None:
    assert_same(llama, {**CALL, "logits_processor": [lambda ids, scores: scores.double() * 2]})
    assert_same(llama, {**CALL, "logits_processor": [lambda ids, scores: scores.roll(3, dims=-1)]})


def test_a_criterion_that_counts_rows(llama: PreTrainedModel) -> None:
    """As evaluation harnesses do: each row's tokens are looked up by its index."""
    found: list[list[list[int]]] = []

    def call() -> dict[str, Any]:
        done = [False] * 3

        def stop(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            for row, tokens in enumerate(input_ids[:, 9:].tolist()):
                done[row] = done[row] or sum(tokens) > 500 + 200 * row
            found.append(input_ids.tolist())
            return torch.tensor(done)

        return {**batch(4, 9, 6), "max_new_tokens": 20, "stopping_criteria": [stop], "eos_token_id": 3}

    assert_same(llama, call)
    assert found[: len(found) // 4] == found[len(found) // 4 : len(found) // 2]


# The model object: dispatch, compile, copies, conversions


@pytest.mark.parametrize("order", ["dispatch first", "patch first"])
def test_accelerate_dispatch(order: str) -> None:
    from accelerate import dispatch_model

    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu", "model.norm": "cpu"}
    device_map |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = tiny_llama()
    if order == "patch first":
        fastgen.patch(model, block_size=4)
    model = dispatch_model(model, device_map, main_device="cpu", force_hooks=True)
    fastgen.patch(model, block_size=4)
    assert_same(model, CALL)
    assert hasattr(model.model.layers[0], "_hf_hook")


def test_accelerate_disk_offload(tmp_path: Path) -> None:
    from accelerate import disk_offload

    model = tiny_llama()
    expected = model.generate(**CALL)
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    fastgen.patch(model, block_size=4)
    assert model.generate(**CALL).tolist() == expected.tolist()


@pytest.mark.parametrize("how", ["wrapper", "wrapper of a patched model", "model.compile", "model.forward"])
def test_a_compiled_model(how: str) -> None:
    """However it is wrapped. What is wrapped runs eagerly here: compiling would take half a minute."""
    model = tiny_llama()
    expected = model.generate(**CALL)
    with torch.compiler.set_stance("force_eager"):
        if how == "wrapper":
            model = fastgen.patch(torch.compile(model, backend="eager"), block_size=4)
        elif how == "wrapper of a patched model":
            model = torch.compile(fastgen.patch(model, block_size=4), backend="eager")
        elif how == "model.compile":
            fastgen.patch(model, block_size=4)
            model.compile(backend="eager")
        else:
            fastgen.patch(model, block_size=4)
            model.forward = torch.compile(model.forward, backend="eager")
        assert model.generate(**CALL).tolist() == expected.tolist()
        last = fastgen.status(model).last_call
        assert last is not None
        assert last.path == ("paged" if how.startswith("wrapper") else "hf")
        fastgen.unpatch(model)
        assert model.generate(**CALL).tolist() == expected.tolist()


def roundtrip(model: PreTrainedModel, how: str, folder: Path) -> PreTrainedModel:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    if how == "torch.save":
        torch.save(model, folder / "model.pt")
        return torch.load(folder / "model.pt", weights_only=False)
    if how == "state_dict":
        torch.save(model.state_dict(), folder / "weights.pt")
        other = tiny_llama(seed=1)
        other.load_state_dict(torch.load(folder / "weights.pt"))
        return other
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "state_dict", "save_pretrained"])
def test_copies_and_saved_models(llama: PreTrainedModel, how: str, used: bool, tmp_path: Path) -> None:
    if used:
        llama.generate(**CALL)
    expected = stock(llama)(**CALL)
    other = roundtrip(llama, how, tmp_path)
    assert other.generate(**CALL).tolist() == expected.tolist()
    assert other.state_dict().keys() == tiny_llama().state_dict().keys()
    assert_same(fastgen.patch(other, block_size=4), CALL)
    del other
    assert_same(llama, CALL)


def test_what_is_saved_does_not_name_us(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.generate(**CALL)
    assert b"fastgen" not in pickle.dumps(llama)
    llama.save_pretrained(tmp_path)
    assert not any(b"fastgen" in file.read_bytes() for file in tmp_path.iterdir())


def test_train_and_eval(llama: PreTrainedModel) -> None:
    first = assert_same(llama, CALL)
    assert llama.train() is llama
    assert assert_same(llama, CALL, path=None).tolist() == first.tolist()
    assert llama.eval() is llama
    assert assert_same(llama, CALL).tolist() == first.tolist()


def test_dtype_changes_between_calls(llama: PreTrainedModel) -> None:
    """Whichever path: what runs is what the model is now, and a pool of the old dtype is not used."""
    assert_same(llama, CALL)
    for convert in ("double", "float", "bfloat16", "half", "float"):
        getattr(llama, convert)()
        exact = convert in ("double", "float")
        if exact:
            assert_same(llama, CALL, atol=5e-4)
        else:
            short = {**CALL, "max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
            expected, actual = stock(llama)(**short), llama.generate(**short)
            torch.testing.assert_close(actual.logits[0], expected.logits[0], atol=0.3, rtol=0.02)
            assert fastgen.status(llama).path == "paged"
        assert_pool_whole(llama)


def test_to_does_not_disturb(llama: PreTrainedModel) -> None:
    first = assert_same(llama, CALL)
    assert llama.to("cpu") is llama
    assert assert_same(llama.to(torch.float32), CALL).tolist() == first.tolist()


@pytest.mark.parametrize("size", [260, 150])
def test_resized_embeddings(llama: PreTrainedModel, size: int) -> None:
    assert_same(llama, CALL)
    llama.resize_token_embeddings(size, mean_resizing=False)
    call = {**CALL, "input_ids": CALL["input_ids"] % 150}
    assert_same(llama, call)
    output = llama.generate(**call, output_logits=True, return_dict_in_generate=True)
    assert output.logits[0].shape == (2, size)


def test_another_attention_between_calls(llama: PreTrainedModel) -> None:
    first = assert_same(llama, CALL)
    llama.set_attn_implementation("eager")
    assert assert_same(llama, CALL, path=None).tolist() == first.tolist()
    assert llama.config._attn_implementation == "eager"
    output = llama(**batch(4, 9), output_attentions=True)
    assert output.attentions[0].shape == (2, 4, 9, 9)


def test_hooks_of_the_user_run(llama: PreTrainedModel) -> None:
    """A forward hook that changes hidden states changes both paths alike."""
    plain = assert_same(llama, CALL)
    handle = llama.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 0.5)
    hooked = assert_same(llama, CALL)
    assert hooked.tolist() != plain.tolist()
    handle.remove()
    assert assert_same(llama, CALL).tolist() == plain.tolist()


def test_autocast(llama: PreTrainedModel) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = stock(llama)(**CALL), llama.generate(**CALL)
    assert actual.tolist() == expected.tolist()


# Threads


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """All at once; returns the results in order, or raises what a job raised."""
    results: list[Any] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def run(index: int) -> None:
        barrier.wait(30)
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("num_blocks", [None, 40, 18])
def test_calls_from_several_threads(num_blocks: int | None) -> None:
    """As one after the other, also where the pool cannot hold all of them at once."""
    model = fastgen.patch(tiny_llama(), block_size=4, num_blocks=num_blocks)
    calls = [{**batch(3 + index, 9, seed=index), "max_new_tokens": 10 + index} for index in range(6)]
    expected = [stock(model)(**call).tolist() for call in calls]
    for _ in range(2):
        results = in_threads(*[lambda call=call: model.generate(**call).tolist() for call in calls])
        assert results == expected
        assert_pool_whole(model)
    assert model.config._attn_implementation == "sdpa"


def test_one_of_several_threads_fails(llama: PreTrainedModel) -> None:
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 12:
            raise RuntimeError("mine alone")
        return scores

    calls = [{**batch(3 + index, 9, seed=index), "max_new_tokens": 16} for index in range(4)]
    expected = [stock(llama)(**call).tolist() for call in calls]
    calls[1]["logits_processor"] = [fail]

    def run(call: dict[str, Any]) -> Any:
        try:
            return llama.generate(**call).tolist()
        except RuntimeError as error:
            return str(error)

    expected[1] = "mine alone"
    assert in_threads(*[lambda call=call: run(call) for call in calls]) == expected
    assert_pool_whole(llama)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_ordinary_forward_in_the_middle_of_ours(implementation: str) -> None:
    """From another thread, while a layer of a generating forward waits: padding, labels and gradients as ever."""
    model = fastgen.patch(tiny_llama(attn_implementation=implementation), block_size=4)
    twin = tiny_llama(attn_implementation=implementation)
    inputs = batch(12, 8, seed=7)
    inner: list[Any] = []

    def forward(module: PreTrainedModel) -> tuple[torch.Tensor, ...]:
        output = module(**inputs, labels=inputs["input_ids"], use_cache=False)
        output.loss.backward()
        gradient = module.model.layers[0].self_attn.q_proj.weight.grad.clone()
        module.zero_grad()
        return output.logits.detach(), output.loss.detach(), gradient

    def interrupt(module: torch.nn.Module, args: Any, output: Any) -> None:
        if len(inner) == 0 and threading.current_thread() is threading.main_thread():
            inner.append(None)
            inner[:] = in_threads(lambda: forward(model))

    model.model.layers[0].register_forward_hook(interrupt)
    sequences = model.generate(**CALL)
    assert_path(model, "paged")
    assert sequences.tolist() == stock(twin)(**CALL).tolist()
    assert_outputs_close(forward(twin), inner[0], atol=1e-6)
    assert_outputs_close(forward(twin), forward(model), atol=1e-6)


def test_a_forward_of_the_model_within_a_processor(llama: PreTrainedModel) -> None:
    """As classifier-free guidance and contrastive decoding do."""

    class Guided(Recorder):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return scores - 0.3 * llama(input_ids[:, 9:] if input_ids.shape[1] > 9 else input_ids).logits[:, -1]

    assert_same(llama, lambda: {**batch(9, 9), "max_new_tokens": 8, "logits_processor": [Guided()]})


def test_a_generate_within_a_processor(llama: PreTrainedModel) -> None:
    """A nested call on the same model: served, and not a deadlock."""
    inner = {**batch(5, seed=3), "max_new_tokens": 3}
    expected = stock(llama)(**inner).tolist()
    answers: list[Any] = []

    def ask(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answers.append(llama.generate(**inner).tolist())
        return scores

    def run() -> Any:
        return llama.generate(**CALL, logits_processor=[ask]).tolist()

    assert in_threads(run) == [stock(llama)(**CALL).tolist()]
    assert answers == [expected] * 12


def test_sampling_with_a_seed_is_repeatable(llama: PreTrainedModel) -> None:
    first = continuation(llama, {**CALL, "do_sample": True}, seed=5)
    for _ in range(2):
        torch.manual_seed(5)
        assert llama.generate(**CALL, do_sample=True)[:, 9:].tolist() == first.tolist()


def test_long_generation_across_many_blocks(llama: PreTrainedModel) -> None:
    assert_same(llama, {"input_ids": torch.tensor(prompts(50)), "max_new_tokens": 150})
