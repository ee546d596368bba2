"""Pretrain a GPT-2: flags -> config -> groups -> model -> engine -> loop -> checkpoint. `--help` lists the flags."""

from __future__ import annotations

import sys
from datetime import timedelta

from megatron.arguments import parse_args
from megatron.distributed import read_environment
from megatron.exits import run
from megatron.signals import StopRequest


def main() -> int:
    stop = StopRequest().listen()
    config = parse_args(sys.argv[1:])
    config.check_world(read_environment().world_size)  # wrong flags end here, before torch is imported

    from megatron import build, distributed
    from megatron.allocator import keep_freed_memory
    from megatron.generate import generate
    from megatron.metrics import MetricsLog
    from megatron.resume import Checkpoints
    from megatron.training import Trainer
    from mpu import groups as mpu_groups

    env = distributed.init(config.parallel.distributed_backend, config.parallel.distributed_timeout_seconds)
    timeout = timedelta(seconds=config.parallel.distributed_timeout_seconds)
    device = distributed.device_for(env, config.parallel.distributed_backend)
    if device.type == "cpu":
        keep_freed_memory()
    groups = mpu_groups.build(config.parallel.model_parallel_size, timeout)
    tokenizer = build.tokenizer(config)
    config = build.with_vocabulary(config, tokenizer)
    datasets = build.datasets(config, tokenizer, groups)
    assert datasets.train is not None, "build.datasets refuses a run without training text"
    checkpoints = Checkpoints(config, groups, datasets.fingerprint)
    build.seed_everything(config.train, groups, device)
    engine = build.engine(config, build.model(config, groups, device), groups)
    state, schedule = checkpoints.resume(engine, build.schedule(config))
    rule = build.batch_rule(config, groups, tokenizer)
    log = MetricsLog(config.log, config.train.train_iters, state.iteration, writes=groups.world.rank == 0)
    trainer = Trainer(config, engine, schedule, rule, device, log, checkpoints.saver(engine, schedule, log.say), stop)
    try:
        for line in (build.summary(config, groups, device), *datasets.notes, *checkpoints.notes):
            log.say(line)
        if state.iteration >= config.train.train_iters > 0:
            log.say(
                f" nothing to do: {config.save.load} is at iteration {state.iteration} of {config.train.train_iters}"
            )
        elif trainer.run(state, datasets.train, datasets.valid):
            trainer.finish(state, datasets.valid, datasets.test)
            if config.log.sample_tokens and not config.data.mock_data:
                text = generate(engine, tokenizer, config.log.sample_prompt, config.log.sample_tokens,
                                max_length=config.model.max_position_embeddings, device=device)
                log.say(f" sample: {text!r}")
    finally:
        log.close()
        checkpoints.close()
    distributed.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
