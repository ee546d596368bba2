"""The lm-eval adapter: runs any lm-eval task on a checkpoint, at any tensor parallel size.

    lm = MegatronLM.of(load="runs/gpt2")
    results = lm_eval.simple_evaluate(model=lm, tasks=["lambada_openai"])

lm-eval sees a single process: every rank receives all requests and returns the same answers, and the ranks divide
the work below it (scoring.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from lm_eval.api.model import TemplateLM

from megatron.evaluate.eval_context import EvalContext, GenerateUntilRequest, TextCompleter
from megatron.evaluate.scoring import continuation_request
from megatron.evaluate.task import document_requests
from megatron.inference.model_args import ModelSource


@final
class MegatronLM(TemplateLM):  # type: ignore[misc]
    def __init__(self, context: EvalContext) -> None:
        super().__init__()
        self._context, self._tokenizer = context, context.model_info.tokenizer
        self._model = context.load_model()
        self._scorer = context.build_scorer(self._model)
        self._completer: TextCompleter | None = None  # made when first needed: its KV cache takes memory

    @classmethod
    def of(cls, load: str | None = None, load_hf: str | None = None, *, batch_size: int = 8,
           **more: Any) -> MegatronLM:
        """`more`: other fields of ModelSource, such as `dtype` and `model_parallel_size`."""
        return cls(EvalContext.open(ModelSource(load, load_hf, **more), batch_size))

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
        return [(score.logprob, score.is_greedy)
                for score in self._scorer(scoring_requests, self._context.new_progress())]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [self._tokenizer.encode_array(request.args[0]) for request in requests]
        requests_by_text = [document_requests([np.asarray(ids)], self._context.model_info) for ids in texts]
        scores = iter(self._scorer([request for each in requests_by_text for request in each],
                                   self._context.new_progress()))
        return [sum(next(scores).logprob for _ in each) for each in requests_by_text]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        if self._completer is None:
            context = self._context
            self._completer = TextCompleter(self._model, self._tokenizer, context.groups, context.batch_size)
        return self._completer([GenerateUntilRequest.from_kwargs(*request.args) for request in requests])
