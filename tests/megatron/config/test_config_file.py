"""`--config` and `--print-config`: a file stands for its flags, and a Config printed as a file comes back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron.config.cli import FORMATS, config_as_text, parse_args
from megatron.errors import ConfigError
from megatron.model import count_parameters
from tests.megatron.helpers import ROOT, TINY, train

FLAGS = ["--preset 124M", "--bf16", "--no-overlap-comm", "--lr 6e-4 --min-lr 1e-05", "--train-data a.txt b.txt",
         "--split 98,1,1", "--optimizer muon", "--lr-decay-style WSD --lr-wsd-decay-iters 5", "--train-iters 100",
         "--zero-stage 3", "--checkpoint-activations", "--tokenizer-type GPT2BPETokenizer", "--save 'runs/a b'",
         "--reduce-bucket-size 5e8", "--wandb-project 12", "--seed 7"]
FOLDER = ROOT / "configs"


@pytest.mark.parametrize("seed", range(20))
def test_a_printed_config_is_read_back(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed).sample(FLAGS, 6)
    config = parse_args([word.strip("'") for flags in chosen for word in flags.replace("a b", "a_b").split()])
    for file_format in FORMATS:
        path = tmp_path / f"run.{file_format}"
        path.write_text(config_as_text(config, file_format))
        again = parse_args(["--config", str(path)])
        assert again.settings() == config.settings()
        assert not again.notes


def test_print_config_prints_the_file_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("preset: tiny\nlr: 3e-4\n")
    with pytest.raises(SystemExit) as ended:
        parse_args(["--config", str(path), "--hidden-size", "128", "--print-config", "toml"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "hidden_size = 128\n" in printed and "lr = 0.0003\n" in printed
    path = path.with_suffix(".toml")
    path.write_text(printed)
    assert parse_args(["--config", str(path)]).model == parse_args(["--preset", "tiny", "--hidden-size", "128"]).model


def test_flags_win_whatever_their_place_and_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("preset: tiny\ntrain-iters: 10\nbf16: yes\nlr: 1\nmin_lr: null\ntrain_data: [a, b]\n")
    flags = f"--micro-batch-size 3 --lr 0.5 --config {path} --no-bf16 --train-file c"
    config = parse_args(flags.split())
    assert (config.train.train_iters, config.train.batch_size, config.schedule.lr) == (10, 3, 0.5)
    assert not config.precision.bf16 and config.data.train_data == ("c",)


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("a.yaml", "train_itres: 3\nhelp: true\n", ["unknown name train_itres: did you mean train_iters?",
                                                "unknown name help: the names are those of the flags"]),
    ("a.yaml", "lr: 1\nlr: 2\n", ["lr is given twice; keep one"]),
    ("a.toml", "train_iters = 1\ntrain-iters = 2\n", ["train-iters is given twice, with dashes and with underscores"]),
    ("a.toml", "lr = 1\nlr = 2\n", ["no valid TOML: Cannot overwrite a value"]),
    ("a.yaml", "lr: [1\n", ["no valid YAML: "]),
    ("a.yaml", "- lr\n", ["expected names and values, as in `lr: 6e-4`"]),
    ("a.toml", "[optim]\nlr = 1\n", ["optim is a section: write the names of flags without sections"]),
    ("a.yaml", "lr: fast\nbf16: 3\n", ["--lr is fast: expected a number", "--bf16=3: --bf16 is a switch"]),
    ("a.yaml", "num_layers: [1, 2]\n", ["unexpected argument 2"]),
    ("a.yaml", "config: b.yaml\n", ["unknown name config"]),
    ("a.yaml", "epochs: 3\n", ["--epochs 3 is not a flag here: use --train-iters STEPS"]),
])
def test_errors_name_the_file(tmp_path: Path, name: str, text: str, expected: list[str]) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        parse_args(["--config", str(path)])
    for sentence in expected:
        assert f"{path}: {sentence}" in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.yaml: cannot be read: .*No such file"):
        parse_args(["--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(("name", "millions"), [
    ("gpt2_124m.yaml", 124), ("gpt2_345m.yaml", 355), ("gpt2_1.5b_zero1.yaml", 1558), ("gpt2_10b_zero2.yaml", 10279)])
def test_shipped_configs(name: str, millions: int) -> None:
    """Each is accepted on 8 ranks without a note, and its head says how to start it."""
    path = FOLDER / name
    command = f"python -m megatron.launch --nproc-per-node 8 pretrain_gpt2.py --config configs/{name}"
    assert f"#   {command}\n" in path.read_text()
    config = parse_args(["--config", str(path), "--vocab-size", "50257"], world_size=8)
    config.check_world(8)
    assert not config.notes and round(count_parameters(config.model)[0] / 1e6) == millions


def test_the_shipped_fine_tuning_config_takes_the_shape_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4}')
    config = parse_args(["--config", str(FOLDER / "finetune_gpt2.yaml"), "--load-hf", str(tmp_path)])
    assert (config.model.num_layers, config.schedule.lr) == (3, 3e-5) and not config.notes


def test_a_shipped_config_trains(tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("Once upon a time. " * 400)
    printed = train(["--config", FOLDER / "gpt2_124m.yaml", *TINY, "--train-data", text, "--split", "90,10,0",
                     "--train-iters", "2", "--batch-size", "1", "--global-batch-size", "1", "--lr-warmup-iters", "0",
                     "--save", tmp_path / "run", "--load", tmp_path / "run", "--log-interval", "1"])
    assert "iteration        2/       2" in printed and (tmp_path / "run" / "latest").exists()
