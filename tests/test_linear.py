"""Projections computed another way are the same projections."""

from __future__ import annotations

import pytest
import torch

from fastgen.linear.cpu import CpuLinears, projections


@pytest.mark.parametrize("rows", [1, 4, 33, 80])
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_within_a_rounding_of_exact(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48, bias=bias)
    states = torch.randn(2, rows, 64)
    with CpuLinears(), torch.no_grad():
        actual = layer(states)
    exact = layer.double()(states.double())
    assert actual.dtype is torch.float32
    assert actual.is_contiguous()
    rounding = torch.finfo(torch.float32).eps * 64
    assert ((actual.double() - exact).abs() <= rounding * (exact.abs() + 1)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_are_left_alone(dtype: torch.dtype) -> None:
    layer, states = torch.nn.Linear(64, 48).to(dtype), torch.randn(5, 64).to(dtype)
    expected = layer(states)
    with CpuLinears():
        assert torch.equal(layer(states), expected)


def test_a_vocabulary() -> None:
    layer, states = torch.nn.Linear(16, 9000), torch.randn(1, 5, 16)
    expected = layer(states)
    with CpuLinears(), torch.no_grad():
        assert torch.allclose(layer(states), expected, atol=1e-5)


def test_other_calls_and_other_tensors_are_left_alone() -> None:
    layer, states = torch.nn.Linear(8, 8), torch.randn(5, 8)
    expected = torch.nn.functional.linear(states, layer.weight, layer.bias)
    with CpuLinears():
        assert torch.allclose(layer(states), expected)
        assert torch.relu(states).dtype == torch.float32
        with pytest.raises(RuntimeError):
            torch.nn.functional.linear(states, layer.weight.bfloat16())


@pytest.mark.parametrize("rows", [1, 3])
def test_single_streams_pay_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    cpu = torch.device("cpu")
    assert isinstance(projections(torch.float32, cpu, 4), CpuLinears)
    assert not isinstance(projections(torch.bfloat16, cpu, 4), CpuLinears)
    assert not isinstance(projections(torch.float32, cpu, rows), CpuLinears)
