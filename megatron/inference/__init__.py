"""What a trained model is for: text from it.

    source.py       the command line of such a program: which model
    request.py      what is asked of it: prompts, how tokens are drawn, where a text ends
    int8.py         a matrix of 8 bits a number in the place of a weight, and the product with it
    recorded.py     a step on an accelerator, recorded once for each size
    decoder.py      the model over a cache of keys and values: read a prompt, follow with a token of each text
    sampling.py     the next token of one text, from its logits
    generation.py   many texts at a time; one that ends makes room for the next
    prompts.py      where prompts come from: the command line, a file or a pipe
    wording.py      text from tokens, as they come
    rounded.py      the weights of a run that was quantised in training, as they were at work
    loading.py      a model from a checkpoint or a Hugging Face folder, at any tensor parallel size: this rank's part
    live.py         the model of an engine in training
    answers.py      prompts in, text out, in order
    terminal.py     the person at a session: lines, history, Ctrl-C
    session.py      a prompt typed, its answer as it comes, and the next
    former.py       the flags of Megatron-LM's generate_samples.py
    command.py      python -m megatron.generate

`init_inference` is DeepSpeed's call over it (api/). Names are imported on first use: flags are checked without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.inference.api.engine import InferenceEngine
    from megatron.inference.api.init_inference import init_inference
    from megatron.inference.api.policy import Cut

_MODULE_OF = {"init_inference": "init_inference", "InferenceEngine": "engine", "Cut": "policy"}

__all__ = ["Cut", "InferenceEngine", "init_inference"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatron.inference.api.{_MODULE_OF[name]}"), name)
