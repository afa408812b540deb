"""Every class behind AutoModelForCausalLM gives the same before and after the patch."""

import functools

import pytest
import zoo
from zoo_check import Outcome, check

# fmt: off
QUICK = [
    "bart", "bloom", "cohere2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox",
    "gpt_oss", "granite", "jamba", "llama", "llama4_text", "mamba", "mistral", "mixtral", "mpt", "olmo2",
    "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "stablelm", "starcoder2",
]
# fmt: on
PAGED_AT_LEAST = 120


@functools.cache
def outcome_of(model_type: str) -> Outcome | None:
    """One check a class and session; None where it cannot be built."""
    try:
        return check(model_type)
    except zoo.CannotBuild:
        return None


@pytest.mark.parametrize("model_type", QUICK)
def test_quick(model_type: str) -> None:
    outcome = outcome_of(model_type)
    assert outcome is not None
    assert outcome.faults == ()
    # Equal ids mean little where a model repeats one token.
    assert outcome.distinct >= 5


@pytest.mark.nightly
@pytest.mark.parametrize(("model_type", "cls"), [name for name in zoo.names() if name[0] not in QUICK])
def test_class(model_type: str, cls: str) -> None:
    outcome = outcome_of(model_type)
    if outcome is None:
        pytest.skip("cannot be built here")
    assert outcome.faults == ()


@pytest.mark.nightly
def test_most_classes_are_paged() -> None:
    paths = [outcome.path for model_type, _ in zoo.names() if (outcome := outcome_of(model_type)) is not None]
    assert paths.count("paged") >= PAGED_AT_LEAST
