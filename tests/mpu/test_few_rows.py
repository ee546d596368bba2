"""A product of few rows is F.linear's, whichever way it is made."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from mpu.layers import WEIGHT_FIRST_ROWS, linear
from tests.wires import accelerator_side


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 16, 17, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accelerator", [False, True])
def test_products_are_those_of_torch(dtype: torch.dtype, rows: int, bias: bool, accelerator: bool) -> None:
    made = torch.Generator().manual_seed(rows)
    x, weight, b = (torch.randn(*shape, generator=made).to(dtype) for shape in ((rows, 96), (40, 96), (40,)))
    with torch.no_grad(), patch.object(F, "linear", wraps=F.linear) as plain, accelerator_side(accelerator):
        found = linear(x[:, None], weight, b if bias else None)
        assert plain.called == (accelerator or rows not in WEIGHT_FIRST_ROWS.get(dtype, ()))
    assert found.shape == (rows, 1, 40)
    expected = x.double() @ weight.double().t() + (b.double() if bias else 0)
    # sums of 96 products in fp32, rounded once (the bias may be added after): half a unit of the largest value, twice
    unit = torch.finfo(dtype).eps * (1 if dtype != torch.float32 else 96)
    torch.testing.assert_close(found[:, 0].double(), expected, atol=unit * 40, rtol=unit)
    assert found.is_contiguous()


def test_where_a_gradient_may_be_wanted_the_product_is_torchs() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    with patch.dict(WEIGHT_FIRST_ROWS, {torch.float32: range(1, 65)}):
        linear(torch.randn(1, 3), weight).sum().backward()
    assert weight.grad is not None
