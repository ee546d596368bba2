"""What `init_inference` returns: the model, cut and cast, called as it was before; and `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from megatron.config.setting import require
from megatron.errors import ConfigError
from megatron.inference.api.answer import DecoderCache, GenerateArguments, generate_ids
from megatron.inference.api.same import assert_tensors_equal_across_ranks
from megatron.model.gpt2 import GPT2
from mpu.collectives import broadcast_into
from mpu.groups import Group


@final
class InferenceEngine(nn.Module):
    def __init__(self, module: nn.Module, gpt2: GPT2 | None, tp: Group, max_out_tokens: int | None) -> None:
        """`gpt2` is the model for our decoder, where there is one."""
        super().__init__()
        self.module, self.tp, self._max_out_tokens = module, tp, max_out_tokens
        self._decoder_cache = None  # no submodule: its weights are the module's
        if gpt2 is not None:
            positions = gpt2.config.max_position_embeddings
            self._decoder_cache = DecoderCache(gpt2, min(max_out_tokens or positions, positions))

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def generate(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **given: Any) -> Any:
        """Every rank gives the same prompts, and gets the same answers."""
        input_ids = given.pop("inputs", None) if input_ids is None else input_ids
        if self._decoder_cache is None:
            return self._module_generate(input_ids, attention_mask, given)
        require(input_ids is not None, "generate: give input_ids, [rows, length] token ids")
        assert input_ids is not None
        defaults = {**self._defaults(), **_generation_config_dict(given.pop("generation_config", None))}
        return generate_ids(self._decoder_cache, input_ids, attention_mask, GenerateArguments.parse(defaults, given))

    def _module_generate(self, input_ids: Tensor | None, mask: Tensor | None, given: dict[str, Any]) -> Any:
        """By the generate of the module itself, with rank 0's random numbers."""
        own = getattr(self.module, "generate", None)
        if own is None:
            raise ConfigError(f"generate: {type(self.module).__name__} has no generate of its own: call the engine "
                              "for its outputs")
        assert_tensors_equal_across_ranks([one for one in (input_ids, mask) if one is not None], self.tp, "input_ids")
        if input_ids is not None and self._max_out_tokens is not None:
            length = input_ids.shape[1]
            total_length = given.get("max_length") or length + (given.get("max_new_tokens") or 0)
            require(
                max(length, total_length) <= self._max_out_tokens,
                f"generate: {max(length, total_length)} tokens are more than "
                f"max_out_tokens {self._max_out_tokens} of init_inference")
        broadcast_rng_state(self.tp)
        said = {"attention_mask": mask} if mask is not None else {}
        return own(input_ids, **said, **given) if input_ids is not None else own(**said, **given)

    def _defaults(self) -> Mapping[str, Any]:
        """What transformers' model says of its answers."""
        config = getattr(self.module, "generation_config", None)
        return {} if config is None else config.to_dict()

    def train(self, mode: bool = True) -> InferenceEngine:
        require(not mode, "an engine of init_inference does not train: its weights are cut and cast for inference; "
                "megatron.zero.initialize makes one that does")
        return super().train(False)

    def __getattr__(self, name: str) -> Any:
        """What is not the engine's is the module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _generation_config_dict(config: Any) -> dict[str, Any]:
    """By a GenerationConfig that is given in a call, over the model's."""
    if config is None:
        return {}
    as_dict = getattr(config, "to_dict", None)
    require(as_dict is not None, f"generate: generation_config is a {type(config).__name__}: expected a "
            "GenerationConfig of transformers")
    assert as_dict is not None
    return {name: value for name, value in as_dict().items() if value is not None}


def broadcast_rng_state(tp: Group) -> None:
    """torch's streams go on from where rank 0's are, so that all ranks draw the same."""
    if tp.is_solo:
        return
    state = torch.get_rng_state()
    broadcast_into(state, 0, tp).wait()
    torch.set_rng_state(state)
    if torch.cuda.is_available():
        state = torch.cuda.get_rng_state()
        broadcast_into(state, 0, tp).wait()
        torch.cuda.set_rng_state(state)
