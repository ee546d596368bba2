"""`InferenceEngine`, returned by `init_inference`: the sharded and cast module, and `generate` with transformers'
arguments.

`generate` takes [rows, length] token ids and returns [rows x num_return_sequences, length + new] ids. Shorter
answers are padded on the right, prompts of unequal length on the left with an attention mask. The decoder with its
KV cache and CUDA graphs is kept between calls and rebuilt when a call needs more room.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.schema import ErrorList, require
from megatron.errors import ConfigError, NumericsError
from megatron.inference.api.shard_module import assert_tensors_equal_across_ranks
from megatron.inference.decoder import MIN_GRAPH_POSITIONS, Decoder, next_power_of_two
from megatron.inference.generation import Generator, texts_of
from megatron.inference.request import Sampling
from megatron.model.gpt2 import GPT2
from mpu.collectives import broadcast_into, broadcast_json
from mpu.groups import Group

MAX_ROWS = 32  # texts decoded at a time


class DecoderCache:
    """The decoder that an engine keeps between calls, with its KV cache and CUDA graphs. It is rebuilt when a call
    needs more rows or positions, or when the weights have moved."""

    def __init__(self, model: GPT2, limit: int) -> None:
        """No text has more than `limit` positions."""
        self.model, self.limit = model, limit
        # The decoder, and where the weights were: a captured graph reads them there.
        self._cached: tuple[Decoder, list[Any]] | None = None

    @contextmanager
    def acquire(self, texts: int, positions: int) -> Iterator[Decoder]:
        """A decoder for `texts` sequences of up to `positions` tokens. Concurrent callers get separate decoders. An
        exception inside the block drops the decoder: the contents of its rows are undefined then."""
        cached, self._cached = self._cached, None
        weights = [(getattr(weight, "levels", weight).data_ptr(), weight.dtype, weight.device)
                   for weight in self.model.parameters()]
        rows = min(MAX_ROWS, next_power_of_two(texts))
        length = min(self.limit, max(MIN_GRAPH_POSITIONS, next_power_of_two(positions)))
        if cached is None or cached[1] != weights or cached[0].rows < rows or cached[0].max_positions < length:
            if cached is not None:
                rows, length = max(rows, cached[0].rows), max(length, cached[0].max_positions)
            cached = None  # frees its KV cache before another is allocated
            with torch.inference_mode(False):  # what is made in that mode can be written in no other
                cached = Decoder(self.model, rows, length), weights
        yield cached[0]
        self._cached = cached


DEFAULT_NEW_TOKENS = 20  # transformers' default

_OFF, _NONE = (None, False), (None,)
# Unsupported arguments of transformers' generate, and the values that change nothing.
NEUTRAL_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "use_cache": (None, True, False), "num_beams": (None, 1), "num_beam_groups": (None, 1), "early_stopping": _OFF,
    "length_penalty": (None, 1.0), "diversity_penalty": (None, 0.0), "penalty_alpha": _NONE,
    "guidance_scale": (None, 1.0), "no_repeat_ngram_size": (None, 0), "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0), "eta_cutoff": (None, 0.0), "max_time": _NONE, "stop_strings": _NONE,
    "bad_words_ids": _NONE, "suppress_tokens": _NONE, "begin_suppress_tokens": _NONE, "sequence_bias": _NONE,
    "forced_bos_token_id": _NONE, "forced_eos_token_id": _NONE, "cache_implementation": _NONE,
    "return_dict_in_generate": _OFF, "output_scores": _OFF, "output_logits": _OFF, "output_attentions": _OFF,
    "output_hidden_states": _OFF, "synced_gpus": _OFF, "streamer": _NONE, "logits_processor": (None, []),
    "stopping_criteria": (None, []), "token_type_ids": _NONE}

# What a pipeline of transformers passes as max_new_tokens by default, indistinguishable from a caller's value.
HF_PIPELINE_NEW_TOKENS = 256

UNUSED_ARGUMENTS = frozenset({"bos_token_id", "decoder_start_token_id"})  # for encoder-decoder models

ARGUMENT_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "num_return_sequences"),
                    (lambda value: type(value) is int and value >= 1, "a whole number, 1 or more")),
    **dict.fromkeys(("min_length", "min_new_tokens", "top_k"),
                    (lambda value: type(value) is int and value >= 0, "a whole number, 0 or more")),
    "temperature": (lambda value: 0 < value < float("inf"), "more than 0; without do_sample, the likeliest token is "
                    "taken"),
    "top_p": (lambda value: 0 < value <= 1, "more than 0, at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "0 to 1"),
    "repetition_penalty": (lambda value: 0 < value < float("inf"), "more than 0; 1 changes nothing")}


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """The supported arguments, with transformers' defaults."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int = 0
    min_length: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    num_return_sequences: int = 1
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    seed: int | None = None  # not in transformers; None: drawn from torch's generator
    # The caller gave the length; a default length is reduced to the room that there is.
    length_is_explicit: bool = False

    @classmethod
    def parse(cls, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> GenerateArguments:
        known = {field.name for field in fields(cls)} - {"length_is_explicit"}
        values = {name: value for name, value in {**defaults, **given}.items() if value is not None}
        problems = ErrorList()
        for name in given.keys() - known - NEUTRAL_ARGUMENTS.keys() - UNUSED_ARGUMENTS:
            near = difflib.get_close_matches(name, [*known, *NEUTRAL_ARGUMENTS], n=1)
            problems.append(f"generate: {name} is unknown; " + (
                f"did you mean {near[0]}?" if near else "docs/inference.md lists what is understood"))
        for name in values.keys() & NEUTRAL_ARGUMENTS.keys():
            problems.require(any(values[name] is one or values[name] == one for one in NEUTRAL_ARGUMENTS[name]),
                             f"generate: {name} is {values[name]!r:.60}, which our decoder does not do: leave it out "
                             "(transformers' own generate does, without replace_with_kernel_inject)")
        for name in values.keys() & ARGUMENT_RANGES.keys():
            fits, expected = ARGUMENT_RANGES[name]
            is_number = isinstance(values[name], (int, float)) and fits(values[name])
            problems.require(is_number, f"generate: {name} is {values[name]!r:.60}: expected {expected}")
        problems.raise_if_any()
        values = {name: value for name, value in values.items() if name in known}
        length = "max_length" if "max_length" in values and "max_new_tokens" not in values else "max_new_tokens"
        is_explicit = given.get(length) not in ((None,) if length == "max_length" else (None, HF_PIPELINE_NEW_TOKENS))
        return cls(**values, length_is_explicit=is_explicit)

    def sampling(self) -> Sampling:
        if not self.do_sample:
            return Sampling(greedy=True, repetition_penalty=self.repetition_penalty)
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
                        repetition_penalty=self.repetition_penalty)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        given = self.eos_token_id
        return () if given is None else (given,) if isinstance(given, int) else tuple(given)


@torch.no_grad()
def generate_ids(cache: DecoderCache, input_ids: Tensor, mask: Tensor | None, arguments: GenerateArguments) -> Tensor:
    """[b, s] -> [b x num_return_sequences, s + new]. Collective over tp."""
    model, limit = cache.model, cache.limit
    require(isinstance(input_ids, Tensor) and input_ids.dim() == 2 and 0 not in input_ids.shape,
            "generate: input_ids: expected [rows, length] token ids, at least one in a row")
    if mask is None:
        prompts = [tuple(row) for row in input_ids.tolist()]
    else:
        require(mask.shape == input_ids.shape, f"generate: attention_mask is {list(mask.shape)}, and input_ids "
                f"{list(input_ids.shape)}")
        is_real = mask != 0
        require(bool(is_real[:, -1].all() and (is_real.int().diff(dim=1) >= 0).all()), "generate: pad prompts on the "
                "left: each row of attention_mask is zeros, then ones")
        prompts = [tuple(row[real].tolist()) for row, real in zip(input_ids, is_real)]
    assert_tensors_equal_across_ranks([input_ids] if mask is None else [input_ids, mask], model.tp, "input_ids")
    vocabulary = model.config.known_vocab_size
    for row, prompt in enumerate(prompts):  # an accelerator would read beside the table without an error
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        require(wrong is None, f"generate: input_ids: row {row} has the token id {wrong}, and the model has 0 .. "
                f"{vocabulary - 1}: give ids of its own tokenizer; of padding, attention_mask says where it is")
    longest = max(map(len, prompts))
    least, most = _new_token_bounds(arguments, input_ids.shape[1], longest, limit, model.tp.rank == 0)
    seed = broadcast_json(int(torch.randint(1 << 31, ())) if arguments.seed is None else arguments.seed, model.tp, 0)
    copies = arguments.num_return_sequences
    with cache.acquire(len(prompts) * copies, longest + most) as decoder:
        generator = Generator(decoder, vocabulary=vocabulary, eod=None)  # eos is a token of the answer
        several = [prompt for prompt in prompts for _ in range(copies)]
        texts = texts_of(generator, several, most, arguments.sampling(), seed, arguments.eos_ids, least)
    if any(text.finish_reason == "not finite" for text in texts):
        raise NumericsError("generate: the model produced non-finite logits: give init_inference dtype=torch.bfloat16 "
                            "or torch.float32")
    new = max(len(text.tokens) for text in texts)
    pad = (arguments.pad_token_id if arguments.pad_token_id is not None else arguments.eos_ids[0] if arguments.eos_ids
           else 0)
    rows = [text.tokens + [pad] * (new - len(text.tokens)) for text in texts]
    before = input_ids.repeat_interleave(copies, 0)
    return torch.cat([before, torch.tensor(rows, dtype=before.dtype, device=before.device)], 1)


def _new_token_bounds(arguments: GenerateArguments, width: int, longest: int, limit: int,
                      prints_notes: bool) -> tuple[int, int]:
    """(minimum, maximum) of new tokens after prompts padded to `width`; `longest`: real tokens of the longest one."""
    room, least = limit - longest, arguments.min_new_tokens or max(0, arguments.min_length - width)
    most = DEFAULT_NEW_TOKENS if arguments.max_new_tokens is None else arguments.max_new_tokens
    if arguments.max_new_tokens is None and arguments.max_length is not None:
        most = arguments.max_length - width
    require(most >= 1, f"generate: max_length is {arguments.max_length}, and the prompt has {width} tokens: give "
            "max_new_tokens")
    require(most <= room or not arguments.length_is_explicit and room >= 1,
            f"generate: a prompt of {longest} tokens and {most} new ones are more than the {limit} that the engine has "
            "room for: shorten the prompt, or give a smaller max_new_tokens")
    if most > room and prints_notes:
        print(f"note: generate: after a prompt of {longest} tokens there is room for {room} new ones, not for the "
              f"default of {most}", file=sys.stderr, flush=True)
    most = min(most, room)
    name = f"min_new_tokens is {least}" if arguments.min_new_tokens else f"min_length is {arguments.min_length}"
    require(least <= most, f"generate: {name}, and after a prompt of {width} tokens an answer has {most} at most: give "
            "a smaller one, or a larger max_new_tokens where there is room")
    return least, most


class InferenceEngine(nn.Module):
    def __init__(self, module: nn.Module, gpt2: GPT2 | None, tp: Group, max_out_tokens: int | None) -> None:
        super().__init__()
        self.module, self.tp, self._max_out_tokens = module, tp, max_out_tokens
        self._decoder_cache = None  # not a submodule: its weights are the module's
        if gpt2 is not None:
            positions = gpt2.config.max_position_embeddings
            self._decoder_cache = DecoderCache(gpt2, min(max_out_tokens or positions, positions))

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def generate(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **given: Any) -> Any:
        """Collective over tp, with equal arguments and results."""
        input_ids = given.pop("inputs", None) if input_ids is None else input_ids
        if self._decoder_cache is None:
            return self._module_generate(input_ids, attention_mask, given)
        require(input_ids is not None, "generate: give input_ids, [rows, length] token ids")
        assert input_ids is not None
        # the call's GenerationConfig has precedence over the model's
        model_config, config = getattr(self.module, "generation_config", None), given.pop("generation_config", None)
        defaults = {} if model_config is None else {**model_config.to_dict()}
        if config is not None:
            require(hasattr(config, "to_dict"), f"generate: generation_config is a {type(config).__name__}: expected a "
                    "GenerationConfig of transformers")
            defaults |= {name: value for name, value in config.to_dict().items() if value is not None}
        return generate_ids(self._decoder_cache, input_ids, attention_mask, GenerateArguments.parse(defaults, given))

    def _module_generate(self, input_ids: Tensor | None, mask: Tensor | None, given: dict[str, Any]) -> Any:
        """The module's own `generate`, with rank 0's random numbers."""
        own = getattr(self.module, "generate", None)
        if own is None:
            raise ConfigError(f"generate: {type(self.module).__name__} has no generate of its own: call the engine "
                              "for its outputs")
        assert_tensors_equal_across_ranks([one for one in (input_ids, mask) if one is not None], self.tp, "input_ids")
        if input_ids is not None and self._max_out_tokens is not None:
            length = input_ids.shape[1]
            total_length = given.get("max_length") or length + (given.get("max_new_tokens") or 0)
            require(max(length, total_length) <= self._max_out_tokens, f"generate: {max(length, total_length)} tokens "
                    f"are more than max_out_tokens {self._max_out_tokens} of init_inference")
        broadcast_rng_state(self.tp)
        given |= {"attention_mask": mask} if mask is not None else {}
        return own(input_ids, **given) if input_ids is not None else own(**given)

    def train(self, mode: bool = True) -> InferenceEngine:
        require(not mode, "an engine of init_inference does not train: its weights are cut and cast for inference; "
                "megatron.zero.initialize makes one that does")
        return super().train(False)

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def broadcast_rng_state(tp: Group) -> None:
    """Set torch's random number generators to the state of rank 0, so that all ranks draw the same numbers."""
    if tp.is_solo:
        return
    for device_type in (torch, torch.cuda) if torch.cuda.is_available() else (torch,):
        state = device_type.get_rng_state()
        broadcast_into(state, 0, tp).wait()
        device_type.set_rng_state(state)
