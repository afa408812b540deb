"""`patch`, `unpatch`, `status`, options, and what importing does."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from support import CACHE, assert_path, assert_pool_whole, assert_same, batch, stock, tiny_llama, tiny_model
from transformers import LlamaForCausalLM, PreTrainedModel

import fastgen

CALL = {**batch(4, 9), "max_new_tokens": 12}


def test_patch_in_place_and_once() -> None:
    model = tiny_llama()
    assert fastgen.patch(model, block_size=4) is model
    generate = model.__dict__["generate"]
    assert fastgen.patch(model, block_size=4) is model
    assert model.__dict__["generate"] is generate
    assert_same(model, CALL)
    assert fastgen.unpatch(model) is model
    assert "generate" not in model.__dict__
    assert fastgen.unpatch(model) is model


def test_patch_again_with_other_options() -> None:
    model = fastgen.patch(tiny_llama(), block_size=4)
    assert_same(model, CALL)
    fastgen.patch(model, block_size=8, num_blocks=20)
    assert_same(model, CALL)
    status = fastgen.status(model)
    assert (status.block_size, status.blocks_total) == (8, 20)
    fastgen.unpatch(model)
    assert "generate" not in model.__dict__


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that a patch could leave changed."""
    modules = dict(model.named_modules())
    hooks = {
        (name, kind): tuple(value)
        for name, module in modules.items()
        for kind, value in vars(module).items()
        if kind.endswith("hooks")
    }
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "storage": {name: (tensor.data_ptr(), tensor._version) for name, tensor in model.state_dict().items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "methods": {
            name: {k: id(v) for k, v in vars(module).items() if callable(v)} for name, module in modules.items()
        },
        "class methods": {name: id(value) for cls in type(model).__mro__ for name, value in vars(cls).items()},
        "hooks": hooks,
        "training": [module.training for module in modules.values()],
        "attention": (model.config._attn_implementation, type(model.config._attn_implementation)),
        "config": (model.config.to_dict(), sorted(vars(model.config))),
        "generation_config": (model.generation_config.to_dict(), sorted(vars(model.generation_config))),
        "classes": {name: type(module) for name, module in modules.items()},
    }


def test_unpatch_restores_everything() -> None:
    model = tiny_llama()
    model.generate(**CALL)
    before = snapshot(model)
    fastgen.patch(model, block_size=4)
    during = snapshot(model)
    model.generate(**CALL)
    model.generate(**CALL, num_beams=2)
    with pytest.raises(ValueError, match="nonsense"):
        model.generate(**CALL, nonsense=1)
    fastgen.unpatch(model)
    after = snapshot(model)
    weights = before.pop("weights")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in after.pop("weights").items())
    assert after == before
    assert {name for name in during["attributes"][""] if name not in before["attributes"][""]} == {"generate"}


def test_a_generate_of_the_instance_comes_back() -> None:
    """A wrapper that the user had put on the model is what is accelerated, and what unpatch restores."""
    model = tiny_llama()
    calls = []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(sorted(kwargs))
        return stock(model)(*args, **kwargs)

    model.generate = own
    fastgen.patch(model, block_size=4)
    assert model.generate(**CALL).tolist() == stock(model)(**CALL).tolist()
    assert len(calls) > 0
    fastgen.unpatch(model)
    assert model.generate is own


def live_tensors() -> Counter[tuple[Any, ...]]:
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return Counter((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def test_unpatch_frees_the_pool() -> None:
    model = tiny_llama()
    model.generate(**CALL)
    before = live_tensors()
    fastgen.patch(model, block_size=4, num_blocks=50)
    model.generate(**CALL)
    assert live_tensors().total() > before.total(), "the pool must be there while patched"
    fastgen.unpatch(model)
    assert live_tensors() == before


def test_the_pool_goes_with_the_model() -> None:
    before = live_tensors()
    model = fastgen.patch(tiny_llama(), block_size=4, num_blocks=50)
    model.generate(**CALL)
    del model
    assert live_tensors() == before


def test_returned_tensors_do_not_keep_the_pool() -> None:
    model = fastgen.patch(tiny_llama(), block_size=4, num_blocks=50)
    output = model.generate(**CALL, return_dict_in_generate=True, output_logits=True)
    size = fastgen.status(model).pool_bytes
    assert size > 0
    kept = [storage.nbytes() for storage in {tensor.untyped_storage() for tensor in output.logits}]
    assert sum(kept) <= 12 * 2 * 200 * 4
    fastgen.unpatch(model)
    assert output.sequences.shape == (2, 21)


def test_two_patched_models() -> None:
    one, other = (fastgen.patch(tiny_llama(seed), block_size=size) for seed, size in ((0, 4), (1, 16)))
    first = [model.generate(**CALL).tolist() for model in (one, other)]
    assert first == [stock(model)(**CALL).tolist() for model in (one, other)]
    assert first[0] != first[1]
    fastgen.unpatch(one)
    assert_same(other, CALL)
    assert one.generate(**CALL).tolist() == first[0]
    assert fastgen.status(one).path == "hf"
    assert fastgen.status(other).path == "paged"


def test_a_model_of_another_kind_beside() -> None:
    models = [fastgen.patch(tiny_model(kind), block_size=4) for kind in ("llama", "mamba", "qwen3")]
    for _ in range(2):
        for model, path in zip(models, ("paged", "hf", "paged"), strict=True):
            assert_same(model, {**batch(7, 4, seed=1), "max_new_tokens": 8}, path=path, distinct=2)


def test_status() -> None:
    model = tiny_llama()
    assert fastgen.status(model).path == "hf"
    assert "not patched" in fastgen.status(model).reason
    fastgen.patch(model, block_size=8, num_blocks=30)
    status = fastgen.status(model)
    assert (status.path, status.last_call, status.int8, status.block_size) == ("paged", None, False, 8)
    assert status.reason
    assert "logits" in status.reason
    model.generate(**CALL)
    status = fastgen.status(model)
    assert (status.blocks_total, status.blocks_free + status.blocks_cached) == (30, 30)
    assert status.last_call is not None
    assert status.attn_implementation
    assert status.counters["calls_paged"] == 1
    model.generate(**CALL, num_beams=2)
    status = fastgen.status(model)
    assert status.last_call is not None
    assert "num_beams" in status.last_call.reason
    assert status.counters["calls_hf"] == 1
    assert "num_beams" in str(status)
    assert "paged" in status._repr_html_()
    with pytest.raises(dataclasses.FrozenInstanceError):
        status.path = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"attention_mask": batch(9, 4)["attention_mask"].flip(1)}, "mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_call_on_the_original_path_says_why(call: dict[str, Any], word: str) -> None:
    model = fastgen.patch(tiny_llama(attn_implementation="eager"), block_size=4)
    model.generate(**(CALL | call))
    assert_path(model, "hf")
    assert word in fastgen.status(model).last_call.reason.lower()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("block_sise", 16, TypeError),
        ("block_size", 0, ValueError),
        ("block_size", "16", ValueError),
        ("block_size", True, ValueError),
        ("num_blocks", -1, ValueError),
        ("num_blocks", 2.5, ValueError),
        ("gpu_memory_utilization", 1.5, ValueError),
        ("gpu_memory_utilization", "much", ValueError),
        ("gpu_memory_utilization", float("nan"), ValueError),
        ("max_num_seqs", 0, ValueError),
        ("max_num_batched_tokens", None, ValueError),
        ("attn_implementation", "paged|sdpa", ValueError),
        ("verify", "yes", ValueError),
    ],
)
def test_wrong_options(name: str, value: Any, error: type[Exception]) -> None:
    model = tiny_llama()
    with pytest.raises(error, match=r"allowed|one of|expected") as raised:
        fastgen.patch(model, **{name: value})
    assert name in str(raised.value)
    assert repr(value) in str(raised.value)
    assert "generate" not in model.__dict__


def test_what_is_not_a_model() -> None:
    with pytest.raises(TypeError, match="Linear"):
        fastgen.patch(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="str"):
        fastgen.patch("a name")  # type: ignore[type-var]


def test_options_are_documented_and_frozen() -> None:
    options = fastgen.Options()
    assert options == fastgen.Options(block_size=16, num_blocks=None, gpu_memory_utilization=0.9, max_num_seqs=256)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.block_size = 3  # type: ignore[misc]


class BatchDependent(LlamaForCausalLM):
    """Adds to a row's logits what depends on its place in the batch, as no packed forward could know."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        ramp = torch.arange(output.logits.shape[-1]) * 0.05
        output.logits = output.logits + torch.arange(len(output.logits))[:, None, None] * ramp
        return output


class Peeking(LlamaForCausalLM):
    """Each token sees the mean of its whole sequence's embeddings, beside the attention."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        mean = self.model.embed_tokens(input_ids).mean(1, keepdim=True)
        output.logits = output.logits + self.lm_head(mean)
        return output


class Failing(LlamaForCausalLM):
    """Does not run on a packed row of several sequences."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        if len(input_ids) == 1 and (position_ids.diff() < 0).any():
            raise RuntimeError("what is this?")
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


class CacheReader(LlamaForCausalLM):
    """Its head reads the cache, which attention alone should."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        if output.get(CACHE) is not None:
            output.logits = output.logits + 0.1 * output[CACHE].layers[0].keys.mean()
        return output


def of_class(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    plain = tiny_llama()
    model = kind(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    model.generation_config = plain.generation_config
    return model


@pytest.mark.parametrize("kind", [BatchDependent, Peeking, Failing, CacheReader])
def test_a_model_that_cannot_be_packed(kind: type[LlamaForCausalLM]) -> None:
    """The probe finds out, and whatever path is left gives the original's results."""
    model = of_class(kind)
    expected = model.generate(**CALL)
    fastgen.patch(model, block_size=4)
    assert fastgen.status(model).reason
    assert assert_same(model, CALL, path=None).tolist() == expected.tolist()
    last = fastgen.status(model).last_call
    assert last is not None
    assert last.reason != "packed"
    fastgen.unpatch(model)
    assert "generate" not in model.__dict__


class Moody(LlamaForCausalLM):
    """No two calls give the same logits."""

    calls = 0

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        self.calls += 1
        output.logits = output.logits * (1 + 0.1 * self.calls)
        return output


def test_a_model_that_the_probe_disproves_stays_on_the_original_path(caplog: pytest.LogCaptureFixture) -> None:
    model = fastgen.patch(of_class(Moody), block_size=4)
    status = fastgen.status(model)
    assert status.path == "hf"
    assert "logits differ" in status.reason
    assert any("original path" in record.message for record in caplog.records)
    assert model.generate(**CALL).shape == (2, 21)
    assert_path(model, "hf")
    assert_pool_whole(model)
    results = fastgen.generate(model, [[5, 6, 7], [8, 9]], max_new_tokens=4)
    assert [len(result.token_ids) for result in results] == [4, 4]


def test_the_probe_leaves_no_trace() -> None:
    """Random state, training mode, gradients, weights and the user's generation config."""
    model = tiny_llama()
    model.train()
    model.generation_config.max_new_tokens = 7
    model.generation_config.do_sample = True
    before = snapshot(model)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    fastgen.patch(model)
    assert torch.equal(state, torch.get_rng_state())
    fastgen.unpatch(model)
    after = snapshot(model)
    assert after.pop("weights").keys() == before.pop("weights").keys()
    assert after == before
    assert all(parameter.grad is None for parameter in model.parameters())


PROBE = """
import json, logging, os, random, sys, threading, warnings
import torch, transformers
from transformers import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def state():
    return {
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "sdp": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
        "mkldnn": torch.backends.mkldnn.enabled,
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "grad": torch.is_grad_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "random": [torch.initial_seed(), hash(random.getstate())],
        "root logger": [logging.root.level, len(logging.root.handlers)],
        "transformers logger": [transformers.logging.get_verbosity(), len(logging.getLogger("transformers").handlers)],
        "warnings": len(warnings.filters),
        "environment": sorted(os.environ.items()),
        "attention functions": sorted(ALL_ATTENTION_FUNCTIONS.keys()),
        "generate": [id(GenerationMixin.generate), id(GenerationMixin._sample)],
        "cuda": torch.cuda.is_initialized(),
    }

before = state()
import fastgen
after = state()
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""


def test_importing_has_no_side_effects() -> None:
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(run.stdout.splitlines()[-1]) == {}
