"""Half-precision projections computed in float32 where the CPU has no instructions for them."""

from __future__ import annotations

import pytest
import torch

from fastgen.linear.upcast import Float32Linears, projections


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 4, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_within_a_rounding_of_exact(dtype: torch.dtype, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48, bias=bias).to(dtype)
    states = torch.randn(2, rows, 64).to(dtype)
    with Float32Linears(), torch.no_grad():
        actual = layer(states)
    exact = layer.double()(states.double())
    assert actual.dtype == dtype
    assert ((actual.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + 1e-3).all()


def test_float32_models_and_other_calls_are_left_alone() -> None:
    assert not isinstance(projections(torch.float32, torch.device("cpu")), Float32Linears)
    layer, states = torch.nn.Linear(8, 8), torch.randn(5, 8)
    with Float32Linears():
        assert torch.equal(layer(states), torch.nn.functional.linear(states, layer.weight, layer.bias))
        assert torch.relu(states).dtype == torch.float32
