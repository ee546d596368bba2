"""What turns gradients into new weights: learning rate schedules, the loss scale, and update rules over flat shards.

rule.py (what an optimizer is to the engine), adam.py, lion.py, lamb.py (rules), muon.py (Muon beside AdamW), one_bit.py
(1-bit Adam), one_bit_lamb.py (1-bit Lamb), adam_kernel.py (Adam in Triton), cpu_adam.py
(DeepSpeedCPUAdam, which scripts pass in), torch_rule.py (torch's optimizers as rules), build.py (configuration ->
rule), schedule.py (the learning rate), schedulers.py (DeepSpeed's schedulers), loss_scale.py (for fp16), grid.py (what
weights are rounded to in quantised training).
"""
