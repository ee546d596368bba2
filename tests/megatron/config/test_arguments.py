"""Flags become a frozen config; what cannot be honoured is a ConfigError that names the flag."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from data.cli import suggest_spelling
from data.storage import UsageError
from data.webtext.__main__ import build_parser as webtext
from megatron.checkpoint.cli import parse_arguments as checkpoint
from megatron.config.cli import PRINTED_TEXTS, known_flags, parse_args
from megatron.config.cli_help import FOREIGN_FLAGS, NOTED_FLAGS, help_text
from megatron.config.tree import PRESETS, SECTIONS, Config
from megatron.errors import ConfigError
from megatron.evaluate.cli import build_parser as evaluate
from megatron.inference.cli import build_parser as generate
from megatron.model import count_parameters
from megatron.package import DISTRIBUTION, __version__
from megatron.plan.cli import parse as plan
from megatron.report.run_report import build_parser as report
from megatron.serve.cli import build_parser as serve
from megatron.tune.cli import parse as tune
from tests.megatron.launch.processes import error_of, python


PROMISED = """
--num-layers --hidden-size --num-attention-heads --max-position-embeddings --seq-length --vocab-size
--make-vocab-size-divisible-by
--attention-dropout --hidden-dropout --layernorm-epsilon --init-method-std --model-parallel-size --batch-size
--global-batch-size --train-iters
--lr --min-lr --lr-decay-style --lr-decay-iters --warmup --weight-decay --adam-beta1 --adam-beta2 --adam-eps
--clip-grad --fp16 --bf16 --loss-scale
--initial-loss-scale --loss-scale-window --hysteresis --min-scale --checkpoint-activations --checkpoint-num-layers
--deepspeed-activation-checkpointing --zero-stage --save --load --save-interval --async-save --keep-last --keep-every
--no-save-optim --no-save-rng --no-load-optim
--no-load-rng --finetune --resume-dataloader --override-lr-scheduler --use-checkpoint-lr-scheduler --train-data
--valid-data --test-data --split
--lazy-loader --tokenizer-type --vocab-file --merge-file --tokenizer-path --mock-data --data-cache-path --num-workers
--reset-position-ids
--reset-attention-mask --eval-interval --eval-iters --log-interval --exit-interval --seed --distributed-backend
--distributed-timeout-seconds
--tensorboard-dir --metrics-file --preset --compile --deterministic --debug
""".split()


def test_every_promised_flag_exists() -> None:
    assert not set(PROMISED) - known_flags().keys()


def test_field_names_are_unique_across_sections() -> None:
    counts = Counter(f.name for section in SECTIONS.values() for f in dataclasses.fields(section))
    assert not [name for name, count in counts.items() if count > 1]


def test_dashes_and_underscores_are_the_same() -> None:
    ours, theirs = "--num-layers=3 --hidden-size 64", "--num_layers 3 --hidden_size=64"
    assert parse_args(ours.split()) == parse_args(theirs.split()) != Config()


def test_an_explicit_flag_wins_over_the_preset_wherever_it_stands() -> None:
    for argv in (["--preset", "tiny", "--num-layers", "5"], ["--num-layers", "5", "--preset", "tiny"]):
        assert parse_args(argv).model.num_layers == 5
        assert parse_args(argv).model.hidden_size == PRESETS["tiny"]["hidden_size"]


def test_presets_have_the_published_sizes() -> None:
    assert {name: count_parameters(parse_args(["--preset", name, "--vocab-size", "50257"]).model)[0]
            for name in PRESETS if name[0].isdigit()} == {
        "124M": 124_439_808, "345M": 354_823_168, "774M": 774_030_080, "1.5B": 1_557_611_200, "8.3B": 8_314_143_744,
        "10B": 10_279_047_168, "20B": 19_945_279_488, "40B": 40_184_776_704, "100B": 101_096_718_336,
        "175B": 174_604_259_328, "1T": 1_007_988_403_200}


BAD = [
    (["--num-layer", "3"], "did you mean --num-layers"),
    (["--num-layers", "0"], "--num-layers is 0"),
    (["--lr", "nan"], "--lr is nan"), (["--lr", "inf"], "--lr is inf"),
    (["--min-lr", "1"], "--min-lr 1 is above --lr"),
    (["--hidden-size", "100", "--num-attention-heads", "16"], "100 is not divisible by --num-attention-heads 16"),
    (["--model-parallel-size", "3"], "--num-attention-heads 16 is not divisible by --model-parallel-size 3"),
    (["--model-parallel-size", "3", "--hidden-size", "96", "--num-attention-heads", "3", "--activation", "swiglu"],
     "--intermediate-size 256 is not divisible by --model-parallel-size 3"),
    (["--sequence-parallel", "--model-parallel-size", "2", "--seq-length", "63"],
     "--seq-length 63 is not divisible by --model-parallel-size 2"),
    (["--seq-length", "2048"], "--seq-length 2048 is above --max-position-embeddings 1024"),
    (["--loss-scale", "128"], "needs --fp16"), (["--mock-data", "--train-data", "x"], "exclude each other"),
    (["--finetune"], "--finetune needs --load"), (["stray"], "unexpected argument stray"),
    (["--micro-batch-size", "1.5"], "--batch-size is 1.5: expected an integer"),
    (["--lr", "fast"], "--lr is fast: expected a number"), (["--lr-decay-style", "cosin"], "did you mean cosine?"),
    (["--learning-rate"], "--lr: expected one argument; `--help-all` lists every flag"),
    (["--qwert", "--zuiopq=3"], "unknown flag --qwert: `--help-all` lists every flag\n  (2) unknown flag --zuiopq"),
    (["--deepspeed=ds.json"], "use --deepspeed --deepspeed_config ds.json"),
    (["--bf16", "True"], "--bf16 takes no value; give --bf16 alone"),
    (["--no-save-optim", "False"], "--no-save-optim takes no value; leave --no-save-optim out"),
    (["--lr", "x", "--qwert", "5", "--fp16=maybe"], "x: expected a number\n  (2) unknown flag --qwert: `--help-all` "
     "lists every flag\n  (3) --fp16=maybe: --fp16 is a switch"),
    (["--fp16=maybe"], "--fp16 is a switch, use --fp16 or --no-fp16"),
    (["--fp16", "False", "--qwert"], "--fp16 takes no value; give --no-fp16"),
    (["--init_from=gpt2", "--wandb_log=True"], "--load-hf FOLDER for GPT-2's weights\n  (2) --wandb-log True is not"),
    (["--Remote-Device", "disk"], "--offload-param-device is disk: expected none, cpu or nvme"),
    (["--lr-decay-style", "WSD"], "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    (["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "95", "--lr-warmup-iters", "6", "--train-iters", "100"],
     "--lr-wsd-decay-iters 95 and a warm-up of 6 steps are more than --train-iters 100"),
    (["--lr-warmup-iters", "11", "--train-iters", "10"], "--lr-warmup-iters 11 is above --train-iters 10"),
    (["--skip-train", "--eval-iters", "0"], "--skip-train leaves nothing to do"),
    (["--skip-train"], "--skip-train without weights to evaluate: the model's would be random; give --load"),
    *((f"--optimizer {optimizer}".split(), told) for optimizer, told in (
        ("zeroone_adam", "; 0/1 Adam was retired; use OneBitAdam (onebit_ad"),
        ("muon --optimizer-params adam_lr=fast", "adam_lr is fast: expected a number, true or false"),
        ("muon --no-adam-w-mode", "its decay is decoupled"), ("muon --memory-centric-tiled-linear", "never exist"))),
    ("--quantize-training --train-iters 40".split(), "--quantize-offset 1000 is above --train-iters 40, so"),
    *((f"--preset tiny --quantize-training {flags}".split(), told) for flags, told in (
        ("--quantize-groups 3", "--quantize-groups 3 does not divide the rows of every matrix, 64 "),
        ("--memory-centric-tiled-linear", "--quantize-training and --memory-centric-tiled-linear exclude each other"),
        ("--quantize-target-bits 9 --quantize-start-bits 8",
         "--quantize-target-bits 9 is above --quantize-start-bits 8"),
        ("--quantize-start-bits 17", "--quantize-start-bits is 17: expected a number >= 1 and <= 16"),
        ("--quantize-target-bits 0", "--quantize-target-bits is 0: expected a number >= 1 and <= 16"),
        ("--quantize-period 0", "--quantize-period is 0"), ("--quantize-offset -1", "--quantize-offset is -1"),
        ("--quantize-groups 0", "--quantize-groups is 0"),
        ("--quantize-change-ratio 0", "--quantize-change-ratio is 0.0: expected a number > 0 and <= 1"),
        ("--quantize-target-bits 2 --quantize-type asymmetric", "--quantize-type asymmetric needs"),
        ("--quantize-target-bits 1 --quantize-rounding stochastic", "--quantize-rounding stochastic needs"))),
    *((f"--preset tiny --progressive-layer-drop {flags}".split(), told) for flags, told in (
        ("--pld-theta 0", "--pld-theta is 0.0: expected a number > 0 and <= 1"),
        ("--pld-theta nan", "--pld-theta is nan"), ("--pld-theta 1.5", "--pld-theta is 1.5: expected"),
        ("--pld-gamma -0.1", "--pld-gamma is -0.1: expected a number"),
        ("--num-layers 1", "needs --num-layers of at least 2"),
        ("--cuda-graphs", "--progressive-layer-drop and --cuda-graphs exclude each other"),
        ("--no-ignore-unused-parameters", "--progressive-layer-drop needs --ignore-unused-parameters"))),
    *((f"--preset tiny --flops-profiler-{flags}".split(), told) for flags, told in (
        ("step 0", "--flops-profiler-step"), ("top-modules 0", "top-modules"), ("module-depth -2", "module-depth"),
        ("output-file p.html", "p.html: a profile is JSON or text, no page; name a .json or .txt"))),
    *(([f"--profile-steps={steps}"], "is no FIRST:LAST of steps from 1 on, in their order: write 10:12, say")
      for steps in ("3", "3:", "0:2", "3:2", "a:b", "1:2:3", "-1:2", " 1:2")),
]


def refusal(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    return str(caught.value)


def test_a_flag_that_cannot_be_honoured_is_named() -> None:
    for argv, told in BAD:
        assert told in refusal(argv)
    for argv in ("--optimizer muon --optimizer-params adjust_lr_fn=match_rms_adamw muon_lr=0.02",
                 "--quantize-training --train-iters 40 --quantize-offset 40",
                 "--preset tiny --quantize-training --quantize-groups 8"):
        parse_args(argv.split())  # the nearest that can be


SAME = {
    "nanoGPT": ("--n_layer=3 --n_head=2 --n_embd=64 --block_size=128 --batch_size=8 --max_iters=50 "
                "--learning_rate=1e-3 --grad_clip=0.5 --beta1=0.8 --beta2=0.95 --min_lr=1e-5 "
                "--eval_interval=10 --backend=gloo --compile --init_from=scratch "
                "--gradient_accumulation_steps=1 --dtype=float32 --bias=True --warmup_iters=5 --eval_only=True "
                "--load=s",
                "--num-layers 3 --num-attention-heads 2 --hidden-size 64 --max-position-embeddings 128 --batch-size 8 "
                "--train-iters 50 --lr 1e-3 --clip-grad 0.5 --adam-beta1 0.8 --adam-beta2 0.95 --min-lr 1e-5 "
                "--eval-interval 10 --distributed-backend gloo --compile --lr-warmup-iters 5 --skip-train --load s"),
    "Hugging Face": ("--per_device_train_batch_size 8 --max_steps 50 --learning_rate 1e-3 --warmup_ratio 0.1 --seed 3 "
                     "--save_steps 10 --save_total_limit 2 --logging_steps 5 --eval_steps 20 --max_grad_norm 0.5 "
                     "--adam_beta1 0.8 --adam_epsilon 1e-6 --gradient_checkpointing --torch_compile --logging_dir b "
                     "--dataloader_num_workers 3 --report_to none --weight_decay 0.1 --bf16 --train_file a.jsonl",
                     "--batch-size 8 --train-iters 50 --lr 1e-3 --warmup 0.1 --seed 3 --save-interval 10 --keep-last 2 "
                     "--log-interval 5 --eval-interval 20 --clip-grad 0.5 --adam-beta1 0.8 --adam-eps 1e-6 "
                     "--checkpoint-activations --compile --tensorboard-dir b --num-workers 3 --weight-decay 0.1 --bf16 "
                     "--train-data a.jsonl"),
    "Megatron-LM": ("--micro-batch-size 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 "
                    "--context-parallel-size 1 --lr-warmup-fraction .01 --ffn-hidden-size 256 --data-impl mmap "
                    "--position-embedding-type learned_absolute --use-checkpoint-opt-param_scheduler --data-path p "
                    "--use-distributed-optimizer --use-mcore-models --overlap-grad-reduce --eval-iters 0",
                    "--zero-stage 1 --eval-iters 0 --batch-size 2 --model-parallel-size 2 --warmup 0.01 "
                    "--intermediate-size 256 "
                    "--use-checkpoint-lr-scheduler --train-data p"),
    "Megatron-LM, offloaded": ("--zero-stage 1 --optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
                               "--overlap-cpu-optimizer-d2h-h2d --use-torch-optimizer-for-cpu-offload --pin-cpu-grads",
                               "--zero-stage 1 --offload-optimizer-device cpu --offload-optimizer-ratio 0.5"),
    "DeepSpeed's ZeRO-Offload": ("--zero-stage 2 --cpu-optimizer --cpu_torch_adam --lr 1e-3",
                                 "--zero-stage 2 --offload-optimizer-device cpu --lr 1e-3"),
    "DeepSpeed's ZeRO-Infinity": ("--zero-stage 3 --remote-device nvme --offload-param-nvme-path /x --use-pin-memory "
                                  "--scattered-embeddings --split-transformers --zero-contigious-gradients",
                                  "--zero-stage 3 --offload-param-device nvme --offload-param-nvme-path /x"),
}


def test_names_of_other_programs_with_the_same_meaning_are_aliases() -> None:
    for theirs, ours in SAME.values():
        assert parse_args(theirs.split()) == parse_args(ours.split()) != Config()


def test_a_misspelt_flag_is_answered_with_the_one_that_was_meant_and_a_foreign_one_gets_no_guess() -> None:
    for typed, meant in (("--Train-Iters", "--train-iters"), ("--warm_up", "--warmup"),
                         ("--zero-staeg", "--zero-stage"), ("--adam-beta", "--adam-beta1 or --adam-beta2")):
        assert refusal([typed, "4"]).endswith(f"did you mean {meant}?")
    for typed in ("--gas", "--fp8-format", "--use-dist-ckpt", "--rank", "--lr-schedular", "--tp"):
        assert refusal([typed, "4"]).endswith("`--help-all` lists every flag")


TWO_NAMES = {
    "--max_steps 3 --train-iters 4": "--max-steps is 3, but --train-iters is 4: they set the same option",
    "--overlap-comm --no-overlap-grad-reduce": "--overlap-comm is on, but --overlap-grad-reduce is off",
    "--zero-stage 2 --use-distributed-optimizer": "--zero-stage is 2, but --use-distributed-optimizer is 1",
    "--data-path a b --train-data a": "--data-path is a b, but --train-data is a: they set the same option",
    "--warmup 0.1 --lr-warmup-iters 5 --train-iters 100": "--warmup 0.1 is 10 steps of --lr-decay-iters 100, but --lr-"
                                                          "warmup-iters is 5: give one of them",
    "--remote-device cpu --offload-param-device none": "--remote-device is cpu, but --offload-param-device is none",
    "--cpu-optimizer --no-optimizer-cpu-offload": "--cpu-optimizer is on, but --optimizer-cpu-offload is off",
}


def test_two_names_of_one_setting_conflict_or_agree_and_of_one_name_the_last_value_counts() -> None:
    """The flags of a script may be followed by those of its user."""
    for argv, told in TWO_NAMES.items():
        assert refusal(argv.split()).startswith(told)
    assert parse_args(["--max-steps", "4", "--train-iters", "4.0"]).train.train_iters == 4
    assert parse_args(["--train-iters", "3", "--fp16", "--train_iters=4", "--no-fp16"]).train.train_iters == 4
    config = parse_args("--lr-warmup-iters 10 --warmup 0.1 --train-iters 100".split())
    assert config.warmup_steps == 10


def test_a_key_and_a_flag_of_another_kind_for_one_setting_conflict_too(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "steps_per_print": 7, "scheduler": {
        "type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 5}}}))
    argv = ["--deepspeed-config", str(file)]
    for more, told in (("--use-distributed-optimizer", "--zero-stage is 1, but zero_optimization.stage of"),
                       ("--warmup 0.1", "--warmup 0.1 is 10 steps of scheduler.params.total_num_steps 100, but "
                        "scheduler.params.warmup_num_steps is 5: give one of them"),
                       ("--lr-warmup-iters 6", "--lr-warmup-iters is 6, but scheduler.params.warmup_num_steps of")):
        assert told in refusal([*argv, *more.split()])
    config = parse_args([*argv, "--warmup", "0.05", "--lr-warmup-iters", "5", "--log-interval", "3"])
    assert config.warmup_steps == 5 and config.log.log_interval == 3
    assert f" {file}: steps_per_print 7 has no effect: --log-interval 3 is given" in config.notes
    assert parse_args(argv).log.log_interval == 7


def test_a_flag_of_another_program_is_accepted_without_effect_or_refused_with_what_to_use() -> None:
    plain = ["--lr", "1e-3"]
    for name, (answer, *accepted) in FOREIGN_FLAGS.items():
        for value in accepted:
            value = "anything" if value == "*" else value
            for argv in ([f"--{name.title()}", *value.split()], [f"--{name.replace('-', '_')}={value}"]):
                config = parse_args([*argv, *plain])
                assert config == parse_args(plain) and len(config.notes) == (name in NOTED_FLAGS), name
        wrong = "" if "*" in accepted else "nonsense"
        told = refusal([f"--{name}", *wrong.split(), *plain])
        if name != "remote-device":
            assert told.startswith(f"{f'--{name} {wrong}'.strip()} is not a flag here: {answer}")


def test_a_warm_up_of_one_bit_that_outlasts_the_run_is_refused() -> None:
    argv = ["--optimizer", "onebit_adam", "--train-iters", "100", "--onebit-freeze-step"]
    for beyond in ("100", "100000"):
        assert f"--onebit-freeze-step {beyond} is not below --train-iters 100" in refusal([*argv, beyond])
    for wrong in ("0", "-1", "1.5", "soon", ""):
        told = refusal([*argv[:-1], f"--onebit-freeze-step={wrong}"])
        assert "expected a number of steps from 1 on, or auto" in told
    for beta2, steps in (("0.9", 20), ("0.999", 2000)):
        auto = [*argv, "auto", "--adam-beta2", beta2, "--train-iters"]
        assert re.search(f"--onebit-freeze-step auto .* after {steps}, .* below --train-iters",
                         refusal([*auto, str(steps)]))
        assert parse_args([*auto, str(steps + 1)]).optim.onebit_freeze_step == "auto"
    assert parse_args([*argv, "99"]).optim.onebit_freeze_step == "99"


def outcome(argv: list[str]) -> Config | str:
    try:
        return parse_args(argv)
    except ConfigError as error:
        return str(error)


def test_every_switch_has_a_value_as_well() -> None:
    """nanoGPT's --compile=False is the switch or its opposite, in every spelling; what is neither is answered."""
    for name, flag in known_flags().items():
        if flag.switch_value is not None:
            off = [flag.opposite] if flag.opposite else []
            for words, value in (([name], "true"), ([name], "1"), (off, "False"), (off, "0")):
                assert outcome([f"{name}={value}"]) == outcome(words), name
            assert name in refusal([f"{name}=perhaps"])


def test_no_foreign_flag_hides_one_of_ours_and_every_answer_names_flags_that_exist() -> None:
    known = {*known_flags(), *PRINTED_TEXTS}
    assert {name for name in FOREIGN_FLAGS if f"--{name}" in known} == {"remote-device"}
    for name, (answer, *_) in FOREIGN_FLAGS.items():
        named = set(re.findall(r"--[a-z][\w-]*", answer)) - {"--nproc-per-node"}
        assert named <= known, name


def test_help_is_one_screen_and_help_all_is_everything() -> None:
    first, rest = help_text(short=True), help_text(short=False)
    assert len(first.splitlines()) <= 64 and max(map(len, first.splitlines())) <= 80
    assert "python pretrain_gpt2.py --preset tiny --mock-data" in first and "megatron.launch" in first
    for text in (first, rest):
        assert "contigious" not in text
        assert not re.findall(r"^  --no-(?!save|load)", text, re.MULTILINE), "a switch is listed once"
    assert "--offload" not in first
    for section in SECTIONS.values():
        for item in dataclasses.fields(section):
            flag = item.name.replace("_", "-")
            assert f"--{flag}" in rest or f"--[no-]{flag}" in rest, flag
    assert max(map(len, rest.splitlines())) <= 80


def test_help_and_version_leave_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, first in (("-h", "usage: "), ("--help-all", "usage: "), ("--version", f"{DISTRIBUTION} {__version__}\n")):
        with pytest.raises(SystemExit) as leaving:
            parse_args(["--num-layers", "3", flag])
        assert leaving.value.code == 0 and capsys.readouterr().out.startswith(first)


def test_accumulation_follows_from_the_batch_sizes_and_a_world_that_does_not_fit_is_refused_with_its_factors() -> None:
    for argv, world, told in (
            ("--model-parallel-size 2", 3, "2 does not divide the number of ranks, 3"),
            ("--profile-steps 1:2 --profile-rank 2", 2, "--profile-rank 2 is not one of the 2 ranks"),
            ("--batch-size 4 --global-batch-size 12", 2,
             "--global-batch-size 12 is not divisible by --batch-size 4 x data parallel size 2")):
        with pytest.raises(ConfigError, match=told):
            parse_args(argv.split()).check_world(world)
    config = parse_args(["--batch-size", "4", "--global-batch-size", "32"])
    assert (config.accumulation(2), config.accumulation(8)) == (4, 1)
    assert parse_args(["--batch-size", "4"]).global_batch_size(3) == 12


def test_config_errors_end_in_one_line_without_importing_torch(tmp_path: Path) -> None:
    done = python("pretrain_gpt2.py", "--num-layers", "x")
    assert "--num-layers" in error_of(done, 2) and done.stdout == "" and done.stderr.count("\n") == 1
    probe = ("import sys; from megatron.config import cli; from megatron.distributed import exit_codes, process_group; "
             "from megatron.launch import launcher; cli.parse_args(sys.argv[1:]); "
             "assert not {'torch', 'numpy'} & set(sys.modules)")
    (tmp_path / "ds.json").write_text("{}")
    done = python("-c", probe, "--deepspeed_config", tmp_path / "ds.json")
    assert done.returncode == 0, done.stderr


# ---- the other commands --------------------------------------------------------------------------------------------

COMMANDS: dict[str, tuple[Callable[[list[str]], object], Sequence[str], str, str]] = {
    "plan": (plan, [], "--rank", "--ranks or --ranks-per-node"), "tune": (tune, [], "--card_gbs", "--card-gb"),
    "report": (report().parse_args, ["run"], "--outptu", "--output"),
    "checkpoint": (checkpoint, ["list", "run"], "--checkpoint_verison", "--checkpoint-version"),
    "generate": (generate().parse_args, [], "--loda", "--load"), "serve": (serve().parse_args, [], "--prot", "--port"),
    "evaluate": (evaluate().parse_args, ["--task", "wikitext", "--data", "x"], "--protocl", "--protocol"),
    "webtext": (webtext().parse_args, ["clean", "x", "--output", "y"], "--overwrit", ""),
}
"""Command -> its parser, what it needs, a misspelt flag and the one that was meant."""


def complaint(parse: Callable[[list[str]], object], argv: list[str]) -> str:
    with pytest.raises((ConfigError, UsageError)) as caught:
        parse(argv)
    return str(caught.value)


def test_a_command_answers_what_is_nearly_its_flag_and_guesses_nothing_else() -> None:
    for parse, needed, typed, meant in COMMANDS.values():
        said = complaint(parse, [*needed, typed, "4"])
        assert f"unknown flag {typed.replace('_', '-')}" in said
        assert f"did you mean {meant}?" in said if meant else "did you mean" not in said
        for foreign in ("--gas", "--fp8-recipe", "--use-dist-ckpt"):
            said = complaint(parse, [*needed, foreign, "4"])
            assert f"unknown flag {foreign}" in said and "did you mean" not in said


def test_dashes_and_underscores_are_the_same_up_to_two_dashes_of_their_own() -> None:
    asked: argparse.Namespace = generate().parse_args(["--load", "x", "--num_samples=2", "--", "--top_k"])
    assert asked.num_samples == 2 and asked.prompts == ["--top_k"]


def test_how_near_a_flag_has_to_be() -> None:
    for word, found in (("--prot", "--port"), ("--POR_T", "--port"), ("--pt", ""), ("--max", ""), ("--lod", "--load"),
                        ("--mx-conections", "--max-connections"), ("--maxc", "--max-connections")):
        hint = suggest_spelling(word, ["--port", "--load", "--max-connections"])
        assert hint == (f"did you mean {found}?" if found else "")
