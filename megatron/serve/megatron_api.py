"""Megatron-LM's text generation server API: parses `PUT /api` and builds its response."""

from __future__ import annotations

import secrets
from typing import Any, final

from megatron.inference.request import Sampling
from megatron.serve.admission import invalid_field
from megatron.serve.api_request import (ApiRequest, NeutralKey, NumberKey, ServedModel, check_text, read_json,
                                        read_keys)

MAX_PROMPTS = 128
DEFAULT_TOKENS = 64
GPT2_EOD = 50256  # old clients send it with any tokenizer


@final
class MegatronGeneration(ApiRequest):
    def full_response(self) -> dict[str, Any]:
        """The texts include the prompt and the line end that stopped them, as in Megatron-LM."""
        decode = self.model.tokenizer.decode
        return {"text": [prompt + decode(text.tokens)
                         for prompt, text in zip(self.shown_prompts, self.texts, strict=True)],
                "segments": [[decode([token]) for token in text.ids] for text in self.texts],
                "logprobs": None if self.top_logprobs is None else [text.scores and text.scores.logprobs
                                                                    for text in self.texts],
                "random_seed": self.seed}


def parse_generation(body: bytes, model: ServedModel) -> MegatronGeneration:
    most = model.max_new_tokens
    asked = read_keys(read_json(body), {
        "prompts": object, "add_BOS": bool, "logprobs": bool, "no_log": bool,
        "tokens_to_generate": NumberKey(min(DEFAULT_TOKENS, most), 0, most),
        "temperature": NumberKey(1.0, 0.001, 100.0), "top_k": NumberKey(0, 0, 1000), "top_p": NumberKey(0.0, 0.0, 1.0),
        "top_p_bound": NumberKey(0.0, 0.0, 1.0), "top_p_decay": NeutralKey((0, 0.0), "is not done here"),
        "random_seed": NumberKey(secrets.randbelow(1 << 31), 0, 1 << 63),
        "stop_on_eol": bool, "stop_on_double_eol": bool,
        "stop_token": NeutralKey((model.eod, GPT2_EOD), "a text ends with its document, or as stop_on_eol says"),
        "prevent_newline_after_colon": NeutralKey((False,), "is not done here"),
        "beam_width": NeutralKey((), "beam search is not done here"),
        "length_penalty": NeutralKey((1, 1.0), "belongs to beam search, which is not done here"),
        "max_len": NeutralKey((), "is no longer used; tokens_to_generate has taken its place"),
        "sentences": NeutralKey((), "is no longer used; prompts has taken its place")})
    texts, top_k, top_p = asked["prompts"], asked["top_k"], asked["top_p"]
    if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_PROMPTS:
        raise invalid_field("prompts", f"expected a list of 1 to {MAX_PROMPTS} texts")
    model.check_num_texts(len(texts), "prompts")
    for text in texts:
        check_text(text, "prompts")
    first: tuple[int, ...] = ()
    if asked["add_BOS"]:
        if model.eod is None:
            raise invalid_field("add_BOS", "this model has no token that begins a document")
        first = (model.eod,)
    elif "" in texts:
        raise invalid_field("prompts", "one is empty, which needs add_BOS")
    if not asked["tokens_to_generate"] and not asked["logprobs"]:
        raise invalid_field("tokens_to_generate", "0 needs logprobs: true")
    if top_k and top_p:
        raise invalid_field("top_p", "cannot be set together with top_k")
    if asked["top_p_bound"] > top_p:
        raise invalid_field("top_p_bound", "expected at most top_p")
    sampling = Sampling(greedy=True) if top_k == 1 else Sampling(temperature=asked["temperature"], top_k=top_k,
                                                                 top_p=top_p or 1.0)
    return MegatronGeneration(
        model, shown_prompts=tuple(texts), max_new_tokens=asked["tokens_to_generate"], sampling=sampling,
        prompts=tuple(model.check_prompt((*first, *model.tokenizer.encode(text)), "prompts") for text in texts),
        seed=asked["random_seed"], stops=("\n",) * asked["stop_on_eol"] + ("\n\n",) * asked["stop_on_double_eol"],
        top_logprobs=0 if asked["logprobs"] else None)
