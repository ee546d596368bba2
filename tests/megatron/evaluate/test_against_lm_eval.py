"""lm-eval's protocol is what lm-eval does: its own tasks on its own transformers model, from the same weights; and its
tasks on a checkpoint of ours through the bridge.

lm-eval is not among requirements-test.txt: with what it brings it takes half a gigabyte. `pip install -e '.[eval]'
accelerate` for these tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.tokenizer import Tokenizer
from megatron.checkpoint.cli import main as convert
from megatron.evaluate.tasks import detokenize, split_articles
from tests.distributed import run_ranks
from tests.megatron.evaluate.models import WIKITEXT, write_lines
from tests.megatron.evaluate.test_command import values
from tests.megatron.helpers import train

pytestmark = pytest.mark.filterwarnings("ignore")

FLAGS = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --init-method-std 0.3 "
         "--tokenizer-type GPT2BPETokenizer --mock-data --train-iters 1 --eval-interval 0 --batch-size 2")

CLOSE = 2e-5
"""Relative, of log-probabilities: two programs' fp32."""

PASSAGES = ["a passage with a last word", "one", "two  spaces before a  word ", "line\n ends\nare white space too",
            "The quick brown fox jumps over the lazy dog, and then there is more text than thirty-two positions hold; "
            "so its beginning is cut off by the model"]


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    reason = "lm-eval is not installed: pip install -e '.[eval]' accelerate"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        pytest.importorskip("accelerate", reason=reason)
        yield pytest.importorskip("lm_eval", reason=reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its Hugging Face folder, and data of each task. Two passages end with the model's own word."""
    made = tmp_path_factory.mktemp("oracle")
    train([*FLAGS.split(), "--save", made / "run"])
    assert convert(["convert", str(made / "run"), "--output", str(made / "hf")]) == 0
    write_lines(made / "pages.jsonl", [{"page": page} for page in split_articles(WIKITEXT * 4)])
    write_lines(made / "lambada.jsonl", [{"text": text} for text in (*PASSAGES, *own_words(made / "run"))])
    rng = random.Random(5)
    words = "[step] go [title] on  a Tree; sit down, and look ünïcode 7 dogs".split(" ")
    write_lines(made / "hellaswag.jsonl", [
        {"activity_label": "Home", "ctx_a": " ".join(rng.choices(words, k=9)), "label": str(number % 4),
         "ctx_b": " ".join(rng.choices(words, k=3)),
         "endings": [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(4)]} for number in range(24)])
    return made


def own_words(run: Path) -> list[str]:
    """Texts whose last word is the one the model takes for the likeliest."""
    from megatron.evaluate.scoring import EvalContext
    from megatron.inference.model_args import ModelSource

    setting = EvalContext(ModelSource(str(run), None), 1)
    model, tokenizer = setting.load_scorer().model, setting.model_info.tokenizer
    found = []
    for number in range(1000):
        context = f"number {number} is"
        word = tokenizer.decode([likeliest(model, tokenizer, context)])
        if word.startswith(" ") and word[1:].isalpha():
            found.append(context + word)
    assert len(found) > 2
    return found[:2]


def likeliest(model: Any, tokenizer: Tokenizer, context: str) -> int:
    import torch

    with torch.no_grad():
        return int(model(torch.tensor([tokenizer.encode(context)]))[0].argmax())


def tasks(folder: Path) -> list[Any]:
    """lm-eval's own, of these files."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.hellaswag.utils import process_docs
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    def task(name: str, metrics: dict[str, str], **config: Any) -> Any:
        return ConfigurableTask(config={
            "task": name, "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
            "metric_list": [{"metric": metric, "aggregation": kind, "higher_is_better": True}
                            for metric, kind in metrics.items()], **config})

    return [
        task("pages", {"word_perplexity": "weighted_perplexity", "byte_perplexity": "weighted_perplexity",
                       "bits_per_byte": "bits_per_byte"}, doc_to_text="", output_type="loglikelihood_rolling",
             doc_to_target=wikitext_detokenizer, process_results=process_results),
        task("lambada", {"perplexity": "perplexity", "acc": "mean"}, output_type="loglikelihood",
             doc_to_text="{{text.split(' ')[:-1]|join(' ')}}", doc_to_target="{{' '+text.split(' ')[-1]}}"),
        task("hellaswag", {"acc": "mean", "acc_norm": "mean"}, output_type="multiple_choice",
             process_docs=process_docs, doc_to_text="{{query}}", doc_to_target="{{label}}", doc_to_choice="choices")]


def theirs(lm: Any, folder: Path) -> dict[str, float]:
    """Figures by task and name."""
    from lm_eval import simple_evaluate

    results = simple_evaluate(model=lm, tasks=tasks(folder), bootstrap_iters=0, log_samples=False)["results"]
    return {f"{task} {name.removesuffix(',none')}": value for task, found in results.items()
            for name, value in found.items() if isinstance(value, float)}


def assert_close(found: dict[str, float], expected: dict[str, float]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        one, other = (math.log(x) if "perplexity" in name else x for x in (found[name], value))
        assert one == pytest.approx(other, rel=CLOSE), name


def test_our_tasks_and_the_bridge_find_what_lm_eval_finds(lm_eval: Any, folder: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from megatron.evaluate.bridge import MegatronLM

    expected = theirs(HFLM(pretrained=str(folder / "hf"), device="cpu", batch_size=2, dtype="float32"), folder)
    assert 2 / 7 <= expected["lambada acc"] < 1
    bridged = theirs(MegatronLM.of(load=str(folder / "run"), batch_size=3), folder)
    assert_close(bridged, expected)
    ours = {name: values("--load", folder / "run", "--task", task, "--protocol", "lm-eval", "--data",
                         folder / f"{name}.jsonl")
            for name, task in (("pages", "wikitext"), ("lambada", "lambada"))}
    assert_close({"pages word_perplexity": ours["pages"]["adjusted_perplexity"],
                  "pages byte_perplexity": 2 ** ours["pages"]["bits_per_byte"],
                  "pages bits_per_byte": ours["pages"]["bits_per_byte"],
                  "lambada perplexity": ours["lambada"]["adjusted_perplexity"], "lambada acc": ours["lambada"]["acc"]},
                 {name: value for name, value in expected.items() if not name.startswith("hellaswag")})


def test_the_detokeniser_is_lm_evals(lm_eval: Any) -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    rng = random.Random(1)
    parts = [*"sN'\"()[]{}=.:;!?,°\n 3", " ", " ", " @-@ ", " @,@ ", " @.@ ", "= ", "/' 4/", " 's", "s '", "word"]
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randint(1, 30)))
        assert detokenize(text) == wikitext_detokenizer({"page": text}), repr(text)


def requests(*args: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in args]


def bridged(rank: int, world: int, run: str, tp: int) -> tuple[list[Any], ...]:
    from megatron.evaluate.bridge import MegatronLM

    lm = MegatronLM.of(load=run, model_parallel_size=tp)
    assert (lm.rank, lm.world_size) == (0, 1)
    texts = requests(*((text,) for text in (*PASSAGES, "")))
    return (lm.loglikelihood(requests(*((text, " word") for text in PASSAGES)), disable_tqdm=True),
            lm.loglikelihood_rolling(texts),
            lm.generate_until(requests(*((text, {"max_gen_toks": 6, "until": "."}) for text in PASSAGES))),
            lm.generate_until(requests(*((text, {"max_gen_toks": 6, "do_sample": True, "temperature": 1.0})
                                         for text in PASSAGES))))


@pytest.mark.slow
def test_the_bridge_gives_every_rank_the_same_answers(lm_eval: Any, folder: Path) -> None:
    ((alone),) = run_ranks(bridged, 1, str(folder / "run"), 1)
    for tp in (1, 2):
        first, second = run_ranks(bridged, 2, str(folder / "run"), tp)
        assert first == second
        assert first[2:] == alone[2:]
        assert flat(first[:2]) == pytest.approx(flat(alone[:2]), rel=CLOSE)


def flat(values: Sequence[Any]) -> list[float]:
    return [float(number) for part in values for value in part
            for number in (value if isinstance(value, tuple) else (value,))]
