"""DeepSpeed's inference API: `megatron.inference.init_inference` and the engine that it returns.

init_inference.py is the call; arguments.py parses its arguments, policy.py plans the tensor parallel layers,
shard_module.py applies the plan and checks the result, engine.py is `InferenceEngine` with `generate`.
"""
