"""The tasks by name."""

from __future__ import annotations

from megatron.evaluate import hellaswag, lambada, perplexity, wikitext
from megatron.evaluate.request import EvalRequest
from megatron.evaluate.task import EvalModelInfo, EvalTask


def prepare_task(request: EvalRequest, model_info: EvalModelInfo) -> EvalTask:
    """Read and tokenize what is asked for."""
    task: EvalTask
    match request.task:
        case "wikitext":
            task = wikitext.prepare(request, model_info)
        case "lambada":
            task = lambada.prepare(request, model_info)
        case "hellaswag":
            task = hellaswag.prepare(request, model_info)
        case _:
            task = perplexity.prepare(request, model_info)
    return task
