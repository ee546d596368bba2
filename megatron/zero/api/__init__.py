"""DeepSpeed's API over the ZeRO engine: what a training script calls.

Begin with initialize.py (`zero.initialize`) and engine.py (`Engine`). init.py
has `zero.Init` and `zero.GatheredParameters`; offload_plan.py decides where state is stored and which side updates it;
compat_names.py answers DeepSpeed's further engine names; torch_interfaces.py has the optimizer, scheduler and loader.
"""
