"""Generation requests: the prompt, the sampling parameters, and where a sequence ends. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.schema import ConfigErrors


@dataclass(frozen=True, kw_only=True)
class Sampling:
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    greedy: bool = False  # always the likeliest token, after the repetition penalty

    def __post_init__(self) -> None:
        problems = [f"--{name} is {value:g}: expected {expected}" for name, value, is_good, expected in (
            ("temperature", self.temperature, 0 < self.temperature < float("inf"),
             "more than 0; --greedy takes the likeliest token"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all) or more"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "more than 0, at most 1"),
            ("min-p", self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition-penalty", self.repetition_penalty, 0 < self.repetition_penalty < float("inf"),
             "more than 0; 1 changes nothing")) if not is_good]
        if problems:
            raise ConfigErrors(problems)


@dataclass(frozen=True)
class Request:
    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int  # at least 1; with `top_logprobs` also 0
    sampling: Sampling = Sampling()
    random_stream: str = ""  # seed of its random numbers
    stops: tuple[str, ...] = ()  # stop strings, which are not part of the answer
    end_tokens: tuple[int, ...] = ()  # the text ends after one of these, which is part of it
    min_new_tokens: int = 0  # before, no end token is sampled
    # For a server: once the text has ended all its tokens are scored, with this many likeliest at each position.
    top_logprobs: int | None = None


@dataclass(frozen=True)
class GenerationConfig:
    max_new_tokens: int
    sampling: Sampling
    num_samples: int = 1  # answers to each prompt
    seed: int = 1234
    stops: tuple[str, ...] = ()
    sliding_window: bool = False  # at the end of the position table, continue from the last tokens
    max_length: int | None = None  # tokens of a prompt and its answer together

    def make_requests(self, prompt: tuple[int, ...], first: int) -> list[Request]:
        """One request for each answer to a prompt, numbered from `first` on."""
        most = self.max_new_tokens
        if self.max_length is not None:
            most = min(most, self.max_length - len(prompt))
        return [Request(number, prompt, most, self.sampling, f"{self.seed}/{number}", self.stops)
                for number in range(first, first + self.num_samples)]
