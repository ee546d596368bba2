"""Optimizers over flat parameter shards, learning rate schedules and the loss scale.

    rule.py              `UpdateRule`: the interface between optimizer and engine
    adam.py, lion.py, lamb.py, muon.py, one_bit.py   optimizers; adam_kernel.py: Adam in Triton
    torch_rule.py        torch.optim optimizers and DeepSpeedCPUAdam as update rules
    build.py             configuration -> update rule
    schedulers.py        learning rate schedules, and DeepSpeed's scheduler classes
    loss_scale.py        fp16 loss scaling
    quantizer.py         quantization levels for MoQ
"""
