"""The lm-eval adapter: runs any lm-eval task on a checkpoint, at any tensor parallel size.

    lm = MegatronLM.of(load="runs/gpt2")
    results = lm_eval.simple_evaluate(model=lm, tasks=["lambada_openai"])

lm-eval sees a single process: every rank receives all requests and returns the same answers, and the ranks divide
the work below it (scoring.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from lm_eval.api.model import TemplateLM

from megatron.config.tree import require
from megatron.evaluate.scoring import EvalContext
from megatron.evaluate.tasks import continuation_request, document_requests
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator
from megatron.inference.model_args import ModelSource
from megatron.inference.request import Request, Sampling
from mpu.collectives import all_gather_json

SEED = 1234
DEFAULT_MAX_NEW_TOKENS = 256
MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN_KWARGS = frozenset({"do_sample", "temperature", "top_k", "top_p", "until", *MAX_TOKENS_KEYS})


@final
class MegatronLM(TemplateLM):  # type: ignore[misc]
    def __init__(self, context: EvalContext) -> None:
        super().__init__()
        self._context, self._tokenizer = context, context.model_info.tokenizer
        self._scorer = context.load_scorer()
        self._decoder: Decoder | None = None  # made when first needed: its KV cache takes memory

    @classmethod
    def of(cls, load: str | None = None, load_hf: str | None = None, *, batch_size: int = 8,
           **more: Any) -> MegatronLM:
        """`more`: other fields of ModelSource, such as `dtype` and `model_parallel_size`."""
        return cls(EvalContext(ModelSource(load, load_hf, **more), batch_size))

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod

    @property
    def max_length(self) -> int:
        return self._context.model_info.max_positions

    @property
    def tokenizer_name(self) -> str:
        return f"{self._tokenizer.name}-{self._tokenizer.fingerprint}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
                              **kwargs: Any) -> list[tuple[float, bool]]:
        scoring_requests = [continuation_request(context, targets, self.max_length, f"request {number} ({words[1]!r})")
                            for number, (words, context, targets) in enumerate(requests)]
        return [(score.logprob, score.is_greedy) for score in self._scorer(scoring_requests)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        requests_by_text = [[*document_requests(self._tokenizer.encode_array(request.args[0]), self.max_length,
                                                self._tokenizer.eod)] for request in requests]
        scores = iter(self._scorer([request for each in requests_by_text for request in each]))
        return [sum(next(scores).logprob for _ in each) for each in requests_by_text]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The texts of all requests, on every rank; data parallel ranks share the work."""
        dp, tokenizer = self._context.groups.dp, self._tokenizer
        wanted = [self._generation_request(number, *request.args) for number, request in enumerate(requests)]
        self._decoder = self._decoder or Decoder(self._scorer.model, self._context.batch_size)
        generator = Generator(self._decoder, vocabulary=tokenizer.vocab_size, eod=tokenizer.eod,
                              decode=tokenizer.decode)
        texts = {str(text.request.number): text.answer() for text in generator.generate(wanted[dp.rank :: dp.size])}
        everywhere = {int(number): text for part in all_gather_json(texts, dp) for number, text in part.items()}
        return [everywhere[number] for number in range(len(wanted))]

    def _generation_request(self, number: int, context: str, kwargs: Mapping[str, Any]) -> Request:
        """From the `generation_kwargs` of an lm-eval task; greedy unless they give a temperature."""
        for name in kwargs:
            require(name in KNOWN_KWARGS,
                    f"generation_kwargs: {name} is not known here; known: {', '.join(sorted(KNOWN_KWARGS))}")
        until = kwargs.get("until") or []
        ends = tuple(end for end in ([until] if isinstance(until, str) else until) if end)
        most = int(next((kwargs[name] for name in MAX_TOKENS_KEYS if kwargs.get(name) is not None),
                        DEFAULT_MAX_NEW_TOKENS))
        temperature = float(kwargs.get("temperature") or 0.0)
        sampling = Sampling(greedy=True)
        if kwargs.get("do_sample", True) and temperature > 0:
            sampling = Sampling(temperature=temperature, top_k=int(kwargs.get("top_k") or 0),
                                top_p=float(kwargs.get("top_p") or 1.0))
        room = self.max_length - most  # the end of the context, so that the answer fits
        require(room > 0, f"{most} new tokens are asked for, and the model has {self.max_length} positions: a task's "
                "generation_kwargs say how many (max_gen_toks)")
        prompt = tuple(self._tokenizer.encode(context)[-room:]) or (self._tokenizer.eod,)
        return Request(number, prompt, most, sampling, f"{SEED}/{number}", ends)
