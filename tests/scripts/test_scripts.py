"""The shell scripts, in a copy of the repository whose path is hostile and whose Python modules only say what they got.

What the real trainer does with the shipped flags is a slow test at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "a b; $(touch x) 'q\" &"
SAY = """import json, os, sys
print(json.dumps({'argv': sys.argv[1:], 'pid': os.getpid(), 'cwd': os.getcwd(),
                  'tunables': os.environ.get('GLIBC_TUNABLES')}))
"""
TRIAL = """import sys
seconds = sys.argv[sys.argv.index('--steps-in') + 1]
print('a trial of', seconds, 's', file=sys.stderr)
print(4 * int(seconds))
"""
SETTINGS = ("GPUS_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PRESET", "RUNS", "NVME_PATH",
            "CARD_GB", "TRAIN_SECONDS", "PYTHON", "VIRTUAL_ENV", "GLIBC_TUNABLES", "WEBTEXT_PREFIX")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / HOSTILE
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("requirements.txt", "requirements-test.txt"):
        shutil.copy(ROOT / name, root)
    for package, module, text in (("megatron", "launch", SAY), ("data", "default_corpus", "")):
        (root / package).mkdir()
        (root / package / "__init__.py").touch()
        (root / package / f"{module}.py").write_text(text)
    (root / "pretrain_gpt2.py").touch()
    for package, module, text in (("train", "processor", "print('--bf16')"), ("tune", "__main__", TRIAL)):
        (root / "megatron" / package).mkdir()
        (root / "megatron" / package / f"{module}.py").write_text(text)
    return root


def run(repository: Path, script: str, *arguments: str, cwd: Path | None = None,
        **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    # No GPU on the path, so that this test says the same on every machine.
    environment["PATH"] = os.pathsep.join(p for p in environment["PATH"].split(os.pathsep)
                                          if not os.path.exists(os.path.join(p, "nvidia-smi")))
    environment |= {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"} | settings
    command = ["bash", str(repository / "scripts" / script), *arguments]
    return subprocess.run(command, cwd=cwd or repository.parent, env=environment, capture_output=True, text=True)


def value(argv: list[str], flag: str) -> str:
    """The value that counts: the last one."""
    return argv[len(argv) - argv[::-1].index(flag)]


def argv_of(repository: Path, script: str, *arguments: str, **settings: str) -> list[str]:
    """The words that the launcher gets."""
    result = run(repository, script, *arguments, **settings)
    assert result.returncode == 0, result.stderr
    words: list[str] = json.loads(result.stdout)["argv"]
    return words


TRAINING = sorted(path.name for pattern in ("pretrain_gpt2*.sh", "ds_*.sh")
                  for path in (ROOT / "scripts").glob(pattern))
DEEPSPEED = [name for name in TRAINING if name.startswith("ds_")]


def test_the_number_of_steps_follows_from_the_speed_and_is_kept_for_resumes(repository):
    def steps(*arguments: str, script: str = "pretrain_gpt2.sh", **settings: str) -> tuple[str, bool]:
        result = run(repository, script, *arguments, **settings)
        assert result.returncode == 0, result.stderr
        return value(json.loads(result.stdout)["argv"], "--train-iters"), "a trial of" in result.stderr

    assert steps() == ("960", True) and steps() == ("960", False), "measured once"
    assert steps(TRAIN_SECONDS="60") == ("240", True)
    assert steps("--train_iters=7") == ("600", False), "the word of the user, which comes last, wins"
    assert steps(PRESET="tiny") == ("500", False)
    assert steps(script="pretrain_gpt2_distributed.sh", NNODES="2") == ("600", False), "the same on every node"
    (repository / "megatron" / "tune" / "__main__.py").write_text("raise SystemExit('error: no memory')")
    failed = run(repository, "pretrain_gpt2.sh", TRAIN_SECONDS="30")
    assert failed.returncode == 1 and "--train-iters N" in failed.stderr
    assert failed.stderr.count("error:") == 1, "that of the tuner, whose exit code is the script's"


def test_one_process_by_default_and_the_runs_folder_is_inside_the_repository(repository):
    argv = argv_of(repository, "pretrain_gpt2.sh")
    assert value(argv, "--nproc-per-node") == "1" and value(argv, "--nnodes") == "1"
    assert str(repository / "pretrain_gpt2.py") in argv and "--log-interval" not in argv
    folder = str(repository / "runs/pretrain_gpt2/small")
    assert value(argv, "--save") == folder == value(argv, "--load"), "so that the next run resumes"
    assert os.path.isdir(folder) and not (repository / ".venv").exists(), "a given Python is used as it is"
    assert argv.count("--bf16") == 1, "as the processor is fit for"
    assert "--bf16" not in argv_of(repository, "pretrain_gpt2.sh", "--fp16")
    (repository / "megatron" / "train" / "processor.py").write_text("")
    assert "--bf16" not in argv_of(repository, "pretrain_gpt2.sh")
    argv = argv_of(repository, "pretrain_gpt2.sh", "--train_data=mine.jsonl")
    assert "--train-data" not in argv and "--tokenizer-path" not in argv, "a corpus of the user's replaces ours"
    assert value(argv, "--tokenizer-type") == "GPT2BPETokenizer"


def test_arguments_come_last_and_unchanged(repository):
    arguments = ["--train-iters", "7", "--save", "$(touch x)", "--deepspeed_config", "a  b'\"", "", "*"]
    for script in TRAINING:
        argv = argv_of(repository, script, *arguments)
        assert argv[-len(arguments):] == arguments, script
        if script in DEEPSPEED:
            shipped = Path(argv[argv.index("--deepspeed_config") + 1])
            assert "--deepspeed" in argv and shipped.is_file() and shipped.parent == repository / "scripts" / "configs"
            assert value(argv, "--preset") == "small"
            assert argv[argv.index("--save") + 1].endswith(f"{script.removesuffix('.sh')}/small")
    assert not list(repository.parent.rglob("x")), "no part of a path or an argument is run"


def test_the_shell_is_replaced_by_the_launcher_and_stays_where_the_user_is(repository, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("raise SystemExit('the wrong data package')")
    result = run(repository, "pretrain_gpt2_distributed.sh", cwd=tmp_path)
    assert json.loads(result.stdout)["cwd"] == str(tmp_path), result.stderr
    for line in (ROOT / "scripts" / "lib.sh").read_text().splitlines():
        assert "megatron.launch" not in line or line.strip().startswith("exec "), "signals must reach the launcher"


def test_without_gpus_two_cpu_ranks_start_and_one_line_says_so(repository):
    for script in ("pretrain_gpt2_distributed.sh", "pretrain_gpt2_model_parallel.sh"):
        result = run(repository, script)
        assert value(json.loads(result.stdout)["argv"], "--nproc-per-node") == "2"
        assert result.stderr.startswith("no GPU: 2 CPU rank(s) of the small model\n")


def test_the_shape_of_the_job_comes_from_the_environment(repository):
    settings = {"GPUS_PER_NODE": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "6001"}
    argv = json.loads(run(repository, "pretrain_gpt2_model_parallel.sh", PRESET="tiny", **settings).stdout)["argv"]
    assert argv[:10] == ["--nproc-per-node", "4", "--nnodes", "2", "--node-rank", "1", "--master-addr", "first",
                         "--master-port", "6001"]
    assert value(argv, "--model-parallel-size") == "2" and value(argv, "--preset") == "tiny"


def test_on_a_cpu_the_allocator_is_set_and_what_the_user_sets_comes_last(repository):
    ours = "glibc.malloc.tcache_count=0"
    assert json.loads(run(repository, "pretrain_gpt2.sh").stdout)["tunables"] == ours
    theirs = "glibc.malloc.tcache_count=9"
    result = run(repository, "pretrain_gpt2.sh", GLIBC_TUNABLES=theirs)
    assert json.loads(result.stdout)["tunables"] == f"{ours}:{theirs}"


def test_help_is_the_trainers_and_sets_nothing_up(repository):
    """No environment is made, no corpus built, and the job's shape is not looked at."""
    (repository / "pretrain_gpt2.py").write_text("import sys; print('help of', sys.argv[1:])")
    own = {"PYTHON": "", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for word, settings in (("--help", {}), ("-h", own), ("--help-all", own)):
        settings["GPUS_PER_NODE"] = "two"
        result = run(repository, "pretrain_gpt2_distributed.sh", "--zero-stage", "2", word, **settings)
        assert (result.returncode, result.stdout, result.stderr) == (0, f"help of ['{word}']\n", "")
    assert not (repository / ".venv").exists() and not (repository / "runs").exists()


def test_the_real_help_comes_within_seconds_from_a_python_without_packages(tmp_path):
    result = run(ROOT, "ds_zero3_pretrain_gpt2.sh", "--help", RUNS=str(tmp_path / "runs"))
    assert result.returncode == 0 and "--train-data" in result.stdout and not (tmp_path / "runs").exists()
    done = subprocess.run([sys.executable, "-S", "-P", str(ROOT / "pretrain_gpt2.py"), "--help"], capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout == result.stdout, done.stderr


REAL_SIZE = {"ds_zero1_pretrain_gpt2_1.5B.sh": "1.5B", "ds_zero2_pretrain_gpt2_10B.sh": "10B",
             "ds_zero_offload_10B_pretrain_gpt2.sh": "10B", "ds_zero_infinity_pretrain_gpt2.sh": "20B"}


def test_a_dry_run_is_of_the_real_size_on_gpus_or_as_asked_for_and_leaves_nothing(repository):
    (repository / "pretrain_gpt2.py").write_text(SAY)
    for script in TRAINING:
        result = run(repository, script, "--dry-run", "--card-gb", "32")
        argv = json.loads(result.stdout)["argv"]
        ranks = "2" if "model_parallel" in script else "1"
        assert argv[-3:] == ["--dry-run", "--card-gb", "32"]
        assert value(argv, "--ranks") == ranks == value(argv, "--ranks-per-node")
        assert value(argv, "--preset") == REAL_SIZE.get(script, "124M") and "--bf16" in argv and "--save" not in argv
        assert result.stderr == f"dry run: the {value(argv, '--preset')} model, {ranks} rank(s)\n"
        assert not (repository / "runs").exists()
    settings = {"GPUS_PER_NODE": "4", "NNODES": "2", "PRESET": "small"}
    argv = json.loads(run(repository, "ds_zero3_pretrain_gpt2.sh", "--dry_run", **settings).stdout)["argv"]
    assert argv[-5:] == ["--ranks", "8", "--ranks-per-node", "4", "--dry_run"]
    assert value(argv, "--preset") == "small" and value(argv, "--vocab-size") == "8192", "no tokenizer is made for it"


def test_the_real_trainer_plans_the_real_size(tmp_path):
    rows = ["19,945,279,488 parameters in bf16 on 1 rank", "\n* 3     nvme+params "]
    settings = {"RUNS": str(tmp_path / "runs"), "NVME_PATH": "/no/drive"}
    result = run(ROOT, "ds_zero_infinity_pretrain_gpt2.sh", "--dry-run", **settings)
    assert result.returncode == 0 and all(row in result.stdout for row in rows), result.stderr
    assert "GiB of host memory" in result.stdout and not (tmp_path / "runs").exists()


def test_the_drive_is_where_the_environment_says(repository, tmp_path):
    script, flags = "ds_zero_infinity_pretrain_gpt2.sh", ("--offload-optimizer-nvme-path", "--offload-param-nvme-path")
    mine = tmp_path / "my drive"
    for folder, settings in ((repository / "runs" / "nvme", {}), (mine, {"NVME_PATH": str(mine)})):
        argv = json.loads(run(repository, script, **settings).stdout)["argv"]
        assert {value(argv, flag) for flag in flags} == {str(folder)} and folder.is_dir()
    (tmp_path / "file").touch()
    result = run(repository, script, NVME_PATH=str(tmp_path / "file" / "x"))
    assert result.returncode == 2 and "set NVME_PATH to a folder on the drive" in result.stderr


def test_a_wrong_setting_is_one_error_line_and_exit_2(repository):
    for name, setting, words in (("PYTHON", "/no/such/python", "PYTHON=/no/such/python is not a command"),
                                 ("PYTHON", "false", "does not run, or is not Python 3.11"),
                                 ("GPUS_PER_NODE", "two", "GPUS_PER_NODE is 'two'")):
        result = run(repository, "pretrain_gpt2_distributed.sh", **{name: setting})
        assert result.returncode == 2 and result.stdout == ""
        assert result.stderr.startswith("error: ") and words in result.stderr and result.stderr.count("\n") == 1


def test_an_active_environment_is_used_and_only_what_it_lacks_is_added(repository, tmp_path):
    bin_folder = tmp_path / "mine" / "bin"
    bin_folder.mkdir(parents=True)
    # A Python that has every package, in whatever version, but no `tqdm`; its pip only says what it is asked.
    (bin_folder / "python").write_text(f"""#!/bin/sh
case "$*" in
    *"-m pip install"*) echo "pip: $*" >&2 ;;
    "- "*) echo tqdm==4.70.1 ;;
    *) exec "{sys.executable}" "$@" ;;
esac
""")
    (bin_folder / "python").chmod(0o755)
    result = run(repository, "pretrain_gpt2.sh", PYTHON="", VIRTUAL_ENV=str(tmp_path / "mine"))
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stderr.splitlines() if line.startswith("pip:")] == [
        "pip: -m pip install --quiet --no-input --disable-pip-version-check tqdm==4.70.1"]
    assert not (repository / ".venv").exists()


@pytest.fixture
def one_gpu(repository: Path, tmp_path: Path) -> dict[str, str]:
    """Settings under which the scripts find a GPU: the driver's tool and torch say that there is one."""
    tool = tmp_path / "driver" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho GPU 0\n")
    tool.chmod(0o755)
    (repository / "torch.py").write_text(
        "from types import SimpleNamespace\n"
        "properties = SimpleNamespace(total_memory=8 * 10**9)\n"
        "cuda = SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda number: properties)\n")
    return {"PATH": f"{tool.parent}:{os.environ['PATH']}"}


def test_a_driver_that_hangs_is_told(repository, one_gpu):
    tool = Path(one_gpu["PATH"].partition(":")[0]) / "nvidia-smi"
    for answer, seconds, code, words in (
            ("exec sleep 5", "1", 2, "error: nvidia-smi has not answered in 1 s"),
            ("echo GPU 0; exec sleep 5", "1", 2, "error: nvidia-smi has not answered in 1 s"),
            ("echo no handle of GPU 0000:01; exit 9", "60", 0, "no GPU: 1 CPU rank"),
            ("true", "60", 0, "no GPU: 1 CPU rank"), ("echo note; echo GPU 0: L4", "60", 0, "1 of 1 GPUs"),
            ("echo GPU 0", "1e3", 2, "error: DRIVER_SECONDS is '1e3'")):
        tool.write_text(f"#!/bin/sh\n{answer}\n")
        result = run(repository, "pretrain_gpt2.sh", DRIVER_SECONDS=seconds, **one_gpu)
        assert result.returncode == code and words in result.stderr


def test_a_run_on_a_gpu_is_in_bf16_unless_the_user_asks_for_fp16(repository, one_gpu):
    for flag, asked in (("--bf16", []), ("--fp16", ["--fp16"])):
        result = run(repository, "pretrain_gpt2.sh", *asked, **one_gpu)
        assert [word for word in json.loads(result.stdout)["argv"] if word in ("--bf16", "--fp16")] == [flag]
        assert "1 of 1 GPUs: the 124M model" in result.stderr and "Traceback" not in result.stderr
    for card in ("abc", "0", "-1", "80GB"):
        result = run(repository, "pretrain_gpt2.sh", CARD_GB=card, **one_gpu)
        assert result.returncode == 2 and f"CARD_GB is '{card}'; expected the GB of a card" in result.stderr


NO_ROOM = """import sys
is_told = any("metrics" in word for word in sys.argv)
print('{"rows": [{"chosen": true, "cards": {"8": {"fits": %s}}}]}' % str(is_told).lower())
"""
"""(A file of metrics is for the trainer to write: the planner would read it, and is not to be told of it.)"""


NO_FILES = "import sys\nprint('{\"rows\": []}')\nsys.exit(0 if {'--save', '--load'} <= set(sys.argv) else 2)"
"""(Some flags need these two: the planner is asked of a run that saves and loads as the script makes it.)"""


PLANS = [
    ("print('{\"rows\": []}')", [], False), (NO_ROOM, ["--metrics-file", "m"], True),
    (NO_ROOM, ["--metrics_file=m"], True), ("raise SystemExit(2)", [], True), (NO_FILES, [], False),
    (NO_FILES, ["--ckpt-step", "10"], False)]


def test_a_run_that_does_not_fit_a_gpu_recomputes(repository, one_gpu):
    """So does one that there is no plan of."""
    for plan, more, recomputed in PLANS:
        (repository / "megatron" / "plan.py").write_text(plan)
        result = run(repository, "pretrain_gpt2.sh", "--lr", "1e-3", *more, **one_gpu)
        argv = json.loads(result.stdout)["argv"]
        assert value(argv, "--train-iters") == "600", "of the 1,200 that there is time for: the corpus is small"
        assert ("--checkpoint-activations" in argv) == recomputed and argv[-len(more) or len(argv):] == more
        assert "Traceback" not in result.stderr


# ---- text, scores and a corpus -----------------------------------------------------------------------------------


def trained(repository: Path, *names: str) -> list[Path]:
    """Folders of runs, each saved later than the one before."""
    folders = [repository / "runs" / "pretrain_gpt2" / name for name in names]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "latest").write_text("global_step1")
        os.utime(folder / "latest", (number, number))
    return folders


def test_text_comes_from_the_newest_run_of_the_quick_start_unless_another_is_named(repository):
    small, tiny = trained(repository, "124M", "tiny")
    (tiny.parent / "unsaved").mkdir()
    for settings, folder in (({}, tiny), ({"PRESET": "124M"}, small)):
        assert argv_of(repository, "generate_text.sh", "--seed", "3", "a  b'$(touch x)", "", **settings) == [
            "--nproc-per-node", "1", "-m", "megatron.generate", "--load", str(folder), "--model-parallel-size", "1",
            "--seed", "3", "a  b'$(touch x)", ""]
    for words in (["--load", "mine"], ["--load-hf=mine"], ["--help"]):
        assert "--load" not in argv_of(repository, "generate_text.sh", *words)[:-len(words)]
    argv = argv_of(repository, "generate_text.sh", "say --load", GPUS_PER_NODE="2")
    assert value(argv, "--nproc-per-node") == "2" == value(argv, "--model-parallel-size") and "--load" in argv
    assert not list(repository.parent.rglob("x"))


def test_the_newest_model_is_scored_on_what_its_training_held_out_unless_the_user_says_otherwise(repository):
    small, other = trained(repository, "small", "124M")

    def asked(*arguments: str, **settings: str) -> list[str]:
        argv = argv_of(repository, "evaluate_gpt2.sh", *arguments, **settings)
        assert value(argv, "--nproc-per-node") == settings.get("GPUS_PER_NODE", "1")
        return argv[argv.index("megatron.evaluate") + 1:]

    held_out = ["--data", f"{repository}/runs/default_corpus/corpus.jsonl", "--part", "valid"]
    assert asked(GPUS_PER_NODE="3") == ["--load", str(other), "--task", "perplexity", *held_out]
    model, wikitext = ["--load", str(small)], ["--task", "wikitext", "--data", "a b'$(x)"]
    assert asked(*wikitext, PRESET="small") == [*model, *wikitext]
    assert asked("--data=mine.txt", PRESET="small") == [*model, "--task", "perplexity", "--data=mine.txt"]
    assert "--part" not in asked("--load_hf", "hf")
    assert asked("--load", "other")[:2] == ["--task", "perplexity"]
    assert asked("--json", "--stride", "8")[-3:] == ["--json", "--stride", "8"]


def test_before_anything_is_trained_a_line_says_how(repository):
    for script, settings, words in (
            ("generate_text.sh", {}, "runs/pretrain_gpt2 yet: bash scripts/pretrain_gpt2.sh"),
            ("evaluate_gpt2.sh", {}, "bash scripts/pretrain_gpt2.sh"),
            ("generate_text.sh", {"PRESET": "124"}, "with PRESET=124 yet")):
        if settings:
            trained(repository, "124M")
        result = run(repository, script, "x", **settings)
        assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: nothing is trained in") and words in result.stderr


def test_the_default_corpus_is_read_where_no_file_of_a_web_corpus_is_named_and_other_arguments_go_through(repository):
    (repository / "data" / "webtext").mkdir()
    (repository / "data" / "default_corpus.py").write_text("import sys\nprint(*sys.argv[1:], file=sys.stderr)\n")
    for name in ("__init__.py", "__main__.py"):
        (repository / "data" / "webtext" / name).write_text("" if name == "__init__.py" else SAY)

    def asked(*arguments: str, **settings: str) -> tuple[list[list[str]], str]:
        result = run(repository, "preprocess_webtext.sh", *arguments, **settings)
        return [json.loads(line)["argv"] for line in result.stdout.splitlines()], result.stderr

    runs, corpus = f"{repository}/runs/webtext", f"{repository}/data/webtext/corpus"
    for arguments in ([], ["--workers", "3"]):
        said, advice = asked(*arguments)
        assert said == [["run", "--output", f"{runs}/stages", "--output-prefix", corpus,
                         f"{runs}/sample/corpus.jsonl", *arguments]]
        assert f"--output-dir {runs}/sample\n" in advice and "--train-data webtext " in advice
    arguments = ["my crawl/", "$(touch x).jsonl", "--skip", "language", "--on-error", "strict"]
    (said,), advice = asked(*arguments, RUNS="/some/runs", WEBTEXT_PREFIX="/some/corpus")
    assert said == ["run", "--output", "/some/runs/webtext/stages", "--output-prefix", "/some/corpus", *arguments]
    assert "--train-data /some/corpus " in advice, "known by its path once the variable is gone"
    assert not list(repository.parent.rglob("x"))


# ---- tests, and scripts as shipped -------------------------------------------------------------------------------


def test_the_tests_end_with_the_code_of_what_failed(repository, tmp_path):
    """Also 0, when nothing did: what the script does on its way out must not count."""
    python = tmp_path / "python"
    for failing, code in (("nothing", 0), ("flake8", 1), ("mypy", 1), ("pytest", 5)):
        python.write_text(f'#!/bin/sh\ncase "$*" in *"-m {failing}"*) exit 5;; esac\n')
        python.chmod(0o755)
        result = run(repository, "test.sh", PYTHON=str(python))
        assert result.returncode == code, result.stderr
        for tool in ("flake8", "mypy"):
            assert f"{tool}: {'failed' if tool == failing else 'passed'}" in result.stderr


def test_every_script_is_sound_bash():
    for script in [*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"]:
        subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.slow
def test_the_shipped_flags_train_resume_write_and_score(tmp_path):
    settings = {"RUNS": str(tmp_path / "runs here"), "PRESET": "tiny"}
    first = run(ROOT, "pretrain_gpt2.sh", "--train-iters", "20", "--save-interval", "10", **settings)
    assert first.returncode == 0, first.stderr
    again = run(ROOT, "pretrain_gpt2.sh", "--train-iters", "30", "--override-lr-scheduler", **settings)
    assert again.returncode == 0, again.stderr
    assert iterations(tmp_path / "runs here/pretrain_gpt2/tiny/metrics.jsonl") == [*range(1, 31)]
    text = run(ROOT, "generate_text.sh", "The", "--max-new-tokens", "5", **settings)
    assert text.returncode == 0 and text.stdout.startswith("The"), text.stderr
    assert "global_step30" in text.stderr
    alone, shared = (run(ROOT, "evaluate_gpt2.sh", "--json", GPUS_PER_NODE=ranks, **settings) for ranks in ("1", "2"))
    found = json.loads(alone.stdout)
    assert (found["task"], found["protocol"], found["part"]) == ("perplexity", "megatron", "valid")
    assert found["examples"] == 41 and 0 < found["bits_per_byte"] < 9
    assert json.loads(shared.stdout)["loss"] == pytest.approx(found["loss"], rel=1e-6)


def iterations(metrics: Path) -> list[int]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["iteration"] for line in lines if "iteration" in line and not line.get("eval")]


@pytest.mark.slow
@pytest.mark.parametrize("script", DEEPSPEED)
def test_a_ds_script_trains_as_shipped(tmp_path, script):
    result = run(ROOT, script, "--train-iters", "3", "--eval-iters", "1", RUNS=str(tmp_path), PRESET="tiny")
    assert result.returncode == 0, result.stderr
    assert iterations(tmp_path / script.removesuffix(".sh") / "tiny" / "metrics.jsonl") == [1, 2, 3]


@pytest.mark.slow
def test_a_model_trains_on_what_the_web_corpus_script_leaves(tmp_path):
    settings = {"RUNS": str(tmp_path), "WEBTEXT_PREFIX": str(tmp_path / "corpus")}
    done = run(ROOT, "preprocess_webtext.sh", **settings)
    assert done.returncode == 0, done.stderr
    trained = subprocess.run(
        [sys.executable, "pretrain_gpt2.py", "--preset", "tiny", "--tokenizer-type", "GPT2BPETokenizer", "--train-data",
         "webtext", "--train-iters", "30", "--lr", "3e-3", "--metrics-file", str(tmp_path / "metrics")],
        cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    losses = [line["lm_loss"] for line in map(json.loads, (tmp_path / "metrics").read_text().splitlines())
              if "iteration" in line and not line.get("eval")]
    assert losses[-1] < losses[0] - 1
