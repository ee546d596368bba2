"""Opens a model for evaluation, and log-likelihood scoring: token windows with targets, scored in batches over data and
tensor parallel ranks.

Token 0 of a sequence has no context and is never scored; every other token is scored once. Batches are formed by
length before they are dealt to data parallel ranks, so results do not depend on the number of ranks. Logits are
computed for targets only, in chunks; each tensor parallel rank reduces its vocabulary columns to 4 numbers per target:
log-sum-exp, largest logit, whether the target is the argmax, target logit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data.storage import DataError
from megatron.config.tree import require
from megatron.distributed import process_group
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.errors import NumericsError
from megatron.evaluate.tasks import EvalModelInfo, ScoringRequest, TargetScore
from megatron.inference import load
from megatron.inference.model_args import ModelSource
from megatron.model.gpt2 import GPT2
from mpu import groups as mpu_groups
from mpu.collectives import all_gather, all_gather_json, all_reduce
from mpu.cross_entropy import VocabShard
from mpu.device import on_accelerator
from mpu.groups import Group, Groups


def local_target_stats(logits: Tensor, targets: Tensor, tp: Group, tokens: int) -> Tensor:
    """[n, V / tp] logits, [n] target ids -> [n, 4] of this rank's columns; ids from `tokens` on are padding."""
    share = VocabShard.of(logits.shape[1], tp, tokens)
    if not share.num_columns:
        return torch.tensor([-torch.inf, -torch.inf, 0, -torch.inf], device=logits.device).expand(len(logits), 4)
    real = logits[:, : share.num_columns].float()
    mine, column = share.locate(targets)
    likeliest = real.argmax(1, keepdim=True)
    return torch.stack([real.logsumexp(1), real.gather(1, likeliest)[:, 0],
                        (mine & (likeliest[:, 0] == column)).float(),
                        real.gather(1, column[:, None])[:, 0].masked_fill(~mine, -torch.inf)], dim=1)


def combine_target_stats(stats: Tensor, tp: Group) -> tuple[Tensor, Tensor]:
    """[n, 4] of every rank -> fp64 log-probabilities [n], and whether each target is the argmax [n]; of equal logits
    the first one is. Collective."""
    total, largest, greedy, at_target = all_gather(stats[None], tp, 0).unbind(-1)  # each [tp, n]
    first = largest.argmax(0, keepdim=True)
    return (at_target.amax(0) - total.logsumexp(0)).double(), greedy.gather(0, first)[0].bool()


CPU_LOGITS_BYTES, GPU_LOGITS_BYTES = 64 << 20, 256 << 20  # fp32 logits of a chunk, this rank's columns


@final
class Scorer:
    def __init__(self, model: GPT2, groups: Groups, batch_size: int) -> None:
        self.model, self._groups, self._batch_size, self._device = model.eval(), groups, batch_size, model.device

    @torch.no_grad()
    def __call__(self, requests: Sequence[ScoringRequest]) -> list[TargetScore]:
        """The score of each request, on every rank. Collective."""
        digest = len(requests)
        for request in requests:
            digest = zlib.crc32(request.tokens.tobytes(), digest + request.first_target)
        digests = all_gather_json(digest, self._groups.world)
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise DataError(f"rank {rank} has other data than rank 0: give all ranks the same file")
        if not requests:
            return []
        # batches of about equal length, the longest first, dealt to the data parallel ranks
        dp, size = self._groups.dp, self._batch_size
        order = sorted(range(len(requests)), key=lambda number: (-len(requests[number].tokens), number))
        mine = [order[at : at + size] for at in range(0, len(order), size)][dp.rank :: dp.size]
        local = torch.zeros(2, len(requests), dtype=torch.float64, device=self._device)  # 0 except in my batches
        # disable=None: the progress is shown on a terminal only
        for batch in tqdm(mine, unit="batch", leave=False, disable=None if self._groups.world.rank == 0 else True):
            local[:, batch] = self._score([requests[number] for number in batch])
        logprobs, greedy = all_reduce(local, dp).tolist()
        scores = [TargetScore(logprob, bool(flag)) for logprob, flag in zip(logprobs, greedy, strict=True)]
        if not all(np.isfinite(logprobs)):
            raise NumericsError("the model gives a token a probability that is not a number or zero: ask for --dtype "
                                "fp32 or bf16")
        return scores

    def _score(self, requests: Sequence[ScoringRequest]) -> Tensor:
        """-> [2, b]: log-probability, and 1 where every target is the argmax."""
        counts = [request.num_targets for request in requests]
        tokens = np.zeros((len(requests), max(len(request.tokens) for request in requests)), np.int64)
        for row, request in zip(tokens, requests):
            row[: len(request.tokens)] = request.tokens  # padding on the right changes nothing before it
        inputs = torch.from_numpy(tokens).to(self._device)
        rows = torch.arange(len(requests)).repeat_interleave(torch.tensor(counts)).to(self._device)  # [n]
        positions = torch.cat([torch.arange(request.first_target, len(request.tokens))
                               for request in requests]).to(self._device)  # [n], of the targets
        hidden = self.model.hidden_states(inputs[:, :-1])[rows, positions - 1]  # [b, s, h] -> [n, h]
        targets, tp, vocabulary = inputs[rows, positions], self.model.tp, self.model.config.known_vocab_size
        chunk_bytes = GPU_LOGITS_BYTES if on_accelerator(hidden) else CPU_LOGITS_BYTES
        chunk = max(1, chunk_bytes * tp.size // (4 * vocabulary))
        stats = torch.cat([local_target_stats(self.model.local_logits(x), target, tp, vocabulary)
                           for x, target in zip(hidden.split(chunk), targets.split(chunk), strict=True)])
        logprobs, greedy = combine_target_stats(stats, tp)
        return torch.stack([torch.stack([part.sum() for part in logprobs.split(counts)]),
                            torch.stack([part.all() for part in greedy.split(counts)]).double()])


@final
class EvalContext:
    """A model that is opened but not read yet, and what it will run on."""

    def __init__(self, source: ModelSource, batch_size: int, must_match: Mapping[str, object] | None = None) -> None:
        """`must_match`: flags that must be equal on all ranks. Collective."""
        env, size = process_group.init_process_group(must_match=must_match), source.model_parallel_size
        require(env.world_size % size == 0, f"--model-parallel-size {size} does not divide the number of ranks, "
                f"{env.world_size}: start a multiple of {size} with python -m megatron.launch --nproc-per-node")
        self.groups, self.batch_size = mpu_groups.build(size), batch_size
        self.opened = opened = load.open_model(source, self.groups)
        self.dtype = source.dtype or opened.precision
        tokenizer = all_succeed_or_raise(lambda: load.build_tokenizer(opened, source.tokenizer), self.groups.world)
        require(tokenizer.eod < opened.shape.known_vocab_size,
                f"{opened.name} has no token for the end of a document")
        self.model_info = EvalModelInfo(tokenizer, opened.shape.max_position_embeddings, opened.data)
        self._device = process_group.device_for(env)

    def load_scorer(self) -> Scorer:
        """Reads the weights. Collective."""
        model = load.build_model(self.opened, self.groups, load.DTYPES[self.dtype], self._device)
        return Scorer(model, self.groups, self.batch_size)
