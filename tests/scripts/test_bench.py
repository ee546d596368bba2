"""The instruments of the benchmarks that could be wrong without looking so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "benchmarks"

PRODUCTS = """
import products, torch
from torch.nn.functional import linear, scaled_dot_product_attention

def results():
    torch.manual_seed(0)
    made = []
    for rows, inner, columns in ((5, 7, 3), (300, 40, 50), (50, 40, 300), (40, 3000, 50)):
        a, b, bias, c = (torch.randn(*shape).bfloat16() for shape in (
            (rows, inner), (inner, columns), (columns,), (rows, columns)))
        made += [a @ b, torch.mm(a, b, out=torch.empty_like(c)), linear(a, b.t().contiguous(), bias),
                 c.clone().addmm_(a, b), c.clone().addmm_(a, b, beta=0.5), a.float() @ b.float()]
    parts = [torch.randn(2, 3, 64, 32).bfloat16().requires_grad_() for _ in range(3)]
    attention = scaled_dot_product_attention(*parts, is_causal=True)
    attention.float().square().sum().backward()
    return made + [attention] + [part.grad for part in parts]

expected = results()
calls, product = [], products.product
products.product = lambda *args: calls.append(1) or product(*args)
products.BLOCK = 1000
products.install("fp32")
for one, other in zip(expected, results(), strict=True):
    # Sums in another order, rounded to the 8 bits of bf16: a last bit, two where sums of sums are rounded.
    torch.testing.assert_close(other, one, rtol=2**-7, atol=2**-7 * float(one.abs().max()))
assert len(calls) >= 4 * 5, "torch's own products were compared with themselves"
print("equal")
"""


def test_products_by_way_of_fp32_are_those_of_bf16() -> None:
    done = subprocess.run([sys.executable, "-c", PRODUCTS], cwd=BENCH, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
