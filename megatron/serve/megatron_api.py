"""Megatron-LM's text generation server API: parses `PUT /api` and builds its response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from megatron.inference.generation import GeneratedSequence
from megatron.inference.request import Sampling
from megatron.serve.admission import invalid_field
from megatron.serve.api_request import ApiRequest, ServedModel, StrictJson, build_sampling, new_seed, valid_text
from megatron.serve.scheduler import SequenceLogprobs

MAX_PROMPTS = 128
DEFAULT_TOKENS = 64
GPT2_EOD = 50256
"""Old clients send it with any tokenizer."""


@final
class MegatronGeneration(ApiRequest):
    def full_response(self, sequences: Sequence[GeneratedSequence],
                      logprobs: Mapping[int, SequenceLogprobs]) -> dict[str, Any]:
        """The texts include the prompt and the line end that stopped them, as in Megatron-LM."""
        decode = self.model.tokenizer.decode
        texts = [decode(text.tokens) for text in sequences]
        return {"text": [prompt + text for prompt, text in zip(self.shown_prompts, texts, strict=True)],
                "segments": [[decode([token]) for token in text.ids] for text in sequences],
                "logprobs": [logprobs[text.request.number].logprobs for text in sequences] if logprobs else None,
                "random_seed": self.seed}


def parse_generation(body: dict[str, Any], model: ServedModel) -> MegatronGeneration:
    fields = StrictJson(body)
    for old, new in (("max_len", "tokens_to_generate"), ("sentences", "prompts")):
        if fields.take(old) is not None:
            raise invalid_field(old, f"is no longer used; {new} has taken its place")
    given = fields.take("prompts")
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_PROMPTS:
        raise invalid_field("prompts", f"expected a list of 1 to {MAX_PROMPTS} texts")
    model.check_num_sequences(len(given), "prompts")
    texts = tuple(valid_text(one, "prompts") for one in given)
    first: tuple[int, ...] = ()
    if fields.take_bool("add_BOS"):
        if model.eod is None:
            raise invalid_field("add_BOS", "this model has no token that begins a document")
        first = (model.eod,)
    elif "" in texts:
        raise invalid_field("prompts", "one is empty, which needs add_BOS")
    request = MegatronGeneration(
        model=model, shown_prompts=texts,
        prompts=tuple(model.check_prompt((*first, *model.encode(text)), "prompts") for text in texts),
        max_new_tokens=fields.take_number("tokens_to_generate", min(DEFAULT_TOKENS, model.max_new_tokens), 0,
                                          model.max_new_tokens),
        sampling=_parse_sampling(fields), seed=fields.take_number("random_seed", new_seed(), 0, 1 << 63),
        stops=("\n",) * fields.take_bool("stop_on_eol") + ("\n\n",) * fields.take_bool("stop_on_double_eol"),
        top_logprobs=0 if fields.take_bool("logprobs") else None)
    if not request.max_new_tokens and request.top_logprobs is None:
        raise invalid_field("tokens_to_generate", "0 needs logprobs: true")
    fields.require_neutral("prevent_newline_after_colon", (False,), "is not done here")
    fields.require_neutral("beam_width", (), "beam search is not done here")
    fields.require_neutral("length_penalty", (1, 1.0), "belongs to beam search, which is not done here")
    fields.require_neutral("stop_token", (model.eod, GPT2_EOD), "a text ends with its document, or as stop_on_eol says")
    fields.take_bool("no_log")
    fields.reject_unknown()
    return request


def _parse_sampling(fields: StrictJson) -> Sampling:
    temperature = fields.take_number("temperature", 1.0, 0.001, 100.0)
    top_k, top_p = fields.take_number("top_k", 0, 0, 1000), fields.take_number("top_p", 0.0, 0.0, 1.0)
    if top_k and top_p:
        raise invalid_field("top_p", "cannot be set together with top_k")
    if fields.take_number("top_p_bound", 0.0, 0.0, 1.0) > top_p:
        raise invalid_field("top_p_bound", "expected at most top_p")
    fields.require_neutral("top_p_decay", (0, 0.0), "is not done here")
    return build_sampling(0.0 if top_k == 1 else temperature, top_k=top_k, top_p=top_p or 1.0)
