"""The tasks by name."""

from __future__ import annotations

from megatron.evaluate import hellaswag, lambada, perplexity, wikitext
from megatron.evaluate.request import Asked
from megatron.evaluate.task import Subject, Task


def prepare(asked: Asked, subject: Subject) -> Task:
    """Read and tokenize what is asked for."""
    made: Task
    match asked.task:
        case "wikitext":
            made = wikitext.prepare(asked, subject)
        case "lambada":
            made = lambada.prepare(asked, subject)
        case "hellaswag":
            made = hellaswag.prepare(asked, subject)
        case _:
            made = perplexity.prepare(asked, subject)
    return made
