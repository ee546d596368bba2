"""FlopsProfiler and get_model_profile: the names that DeepSpeed's users know, and what they leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.profiler import FlopsProfiler, get_model_profile
from megatron.profiler.profile import Macs
from tests.megatron.profiler.closed_form import step_macs
from tests.megatron.profiler.models import gpt2, on_meta, preset, tokens


class Net(nn.Module):
    """Two products of 4 x 6 and 6 x 3 a row, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.drop(self.one(x)).relu())
        return y

    def generate(self, x: Tensor, times: int) -> None:
        for _ in range(times):
            self(x)


MACS = 2 * (4 * 6 + 6 * 3)
PARAMETERS = 5 * 6 + 7 * 3


def test_the_profile_of_a_call_has_what_deepspeed_returns() -> None:
    model = Net()
    quiet: dict[str, Any] = dict(print_profile=False, as_string=False)
    assert get_model_profile(model, (2, 4), **quiet) == (2 * MACS, MACS, PARAMETERS)
    assert get_model_profile(model, args=[torch.zeros(2, 4)], **quiet) == (2 * MACS, MACS, PARAMETERS)
    assert get_model_profile(model, kwargs={"x": torch.zeros(2, 4)}, **quiet)[1] == MACS
    assert get_model_profile(model, args=[torch.zeros(2, 4), 3], mode="generate", **quiet)[1] == 3 * MACS
    assert get_model_profile(model, (2, 4), ignore_modules=[nn.Linear], **quiet) == (0, 0, PARAMETERS)
    assert get_model_profile(model, (2, 4), print_profile=False) == ("168 FLOPs", "84 MACs", "51")


def test_each_module_keeps_its_mode_and_no_gradient_is_made() -> None:
    model = Net()
    model.train()
    model.two.eval()
    streams = torch.get_rng_state()
    get_model_profile(model, (2, 4), print_profile=False)
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert torch.get_rng_state().equal(streams)  # there is no dropout in evaluation
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_raises_keeps_its_modes_as_well() -> None:
    model = Net()
    with pytest.raises(RuntimeError):
        get_model_profile(model, (2, 5), print_profile=False, warm_up=0)
    assert all(module.training for module in model.modules())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_published_gpt2_is_profiled_without_memory_for_it() -> None:
    config = preset("124M")
    x = tokens(on_meta(config), 1)
    flops, macs, parameters = get_model_profile(on_meta(config), args=[x, x], print_profile=False, as_string=False,
                                                warm_up=0)
    head = 1024 * 768 * 50304  # without gradients the loss makes logits, and nothing else
    assert macs == step_macs(config, 1, 1024, causal=False).forward - 2 * head
    assert (flops, parameters) == (2 * macs, 124_439_808)


def test_torchs_own_transformer_is_counted_in_evaluation_as_in_training() -> None:
    """Its fast path, one operation a layer, is off while it is counted, and on again."""
    width, ffn, rows, layers = 64, 256, 2 * 16, 2
    layer = nn.TransformerEncoderLayer(width, 4, ffn, batch_first=True)
    macs = layers * rows * (4 * width * width + 2 * width * ffn + 2 * 16 * width)
    quiet: dict[str, Any] = dict(print_profile=False, as_string=False)
    assert get_model_profile(nn.TransformerEncoder(layer, layers), (2, 16, 64), **quiet)[1] == macs == 3_276_800
    x = torch.zeros(2, 3, 16)
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    assert get_model_profile(attention, args=[x, x, x], **quiet)[1] == 2 * 3 * (4 * 16 * 16 + 2 * 3 * 16)
    assert torch.backends.mha.get_fastpath_enabled()


def test_start_and_stop_count_what_lies_between() -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    model(torch.zeros(2, 4)).sum().backward()
    for _ in range(2):  # counters do not grow from one profile to the next
        profiler.start_profile()
        model(torch.zeros(2, 4)).sum().backward()
        profiler.stop_profile()
        model(torch.zeros(2, 4)).sum().backward()
        assert profiler.profile().macs == Macs(MACS, 2 * MACS - 2 * 4 * 6)
        assert (profiler.get_total_macs(), profiler.get_total_flops()) == (MACS, 2 * MACS)
        assert profiler.get_total_params() == PARAMETERS
        assert profiler.get_total_duration() == profiler.profile().root.seconds > 0
    assert profiler.get_total_params(as_string=True) == "51"
    profiler.reset_profile()
    assert profiler.get_total_macs() == 0
    profiler.end_profile()
    with pytest.raises(ConfigError, match="there is no profile: call start_profile"):
        profiler.get_total_flops()


def test_a_backward_that_was_not_seen_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = FlopsProfiler(Net(), recompute_fwd_factor=1.0)
    profiler.start_profile()
    profiler.model(torch.zeros(2, 4))
    profiler.stop_profile()
    profiler.print_model_profile(detailed=False)
    assert "backward FLOPs per rank, estimated as 3 x forward:" in (said := capsys.readouterr().out)
    assert f"{3 * 2 * MACS} FLOPs" in said
    found = profiler.profile().as_dict()
    assert found["backward_is_estimated"]
    assert found["flops"] == found["flops_here"] == {"forward": 2 * MACS, "backward": 6 * MACS, "recomputation": 0}
    profiler.start_profile()
    profiler.model(torch.zeros(2, 4)).sum().backward()
    profiler.stop_profile()
    found = profiler.profile().as_dict()
    assert not found["backward_is_estimated"] and found["flops"]["backward"] == 2 * profiler.profile().macs.backward


@pytest.mark.parametrize("misuse, message", [
    (lambda: FlopsProfiler("model"), "takes a torch.nn.Module, not a str"),
    (lambda: FlopsProfiler(Net()).stop_profile(), "no profile is under way; call start_profile"),
    (lambda: FlopsProfiler(Net()).print_model_profile(), "there is no profile"),
    (lambda: get_model_profile(Net()), "needs input_shape, args or kwargs"),
    (lambda: get_model_profile(Net(), (2, 4), mode="sing"), "mode='sing': expected one of forward, generate"),
])
def test_misuse_says_what_to_do(misuse: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        misuse()


def test_a_second_start_is_refused_and_the_first_goes_on() -> None:
    profiler = FlopsProfiler(Net())
    profiler.start_profile()
    with pytest.raises(ConfigError, match="a profile is under way"):
        profiler.start_profile()
    profiler.model(torch.zeros(2, 4))
    profiler.stop_profile()
    assert profiler.get_total_macs() == MACS


def test_profiles_that_overlap_end_in_the_order_that_is_right() -> None:
    """Nested they are both whole; the outer one cannot end first, and goes on when it tries."""
    model = Net()
    outer, inner = FlopsProfiler(model), FlopsProfiler(model)
    outer.start_profile()
    model(torch.zeros(2, 4))
    inner.start_profile()
    with pytest.raises(ConfigError, match="stop_profile: another profile.* the last one first"):
        outer.stop_profile()
    model(torch.zeros(2, 4))
    inner.stop_profile()
    model(torch.zeros(2, 4))
    outer.stop_profile()
    model(torch.zeros(2, 4))
    assert (outer.get_total_macs(), inner.get_total_macs()) == (3 * MACS, MACS)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_names_of_a_module_that_was_profiled_under_tensor_parallel_size_1_are_those_of_torch() -> None:
    model = gpt2()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(tokens(model))
    profiler.stop_profile()
    paths = [path for path, _ in model.named_modules()]

    def listed(row: Any) -> list[str]:
        return [row.path, *(path for inner in row.children for path in listed(inner))]

    assert listed(profiler.profile().root) == paths
