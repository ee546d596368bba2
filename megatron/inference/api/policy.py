"""Injection policies: which layers of a module are sharded over tensor parallel ranks, and how.

A column-parallel layer computes some of its output features on each rank; a row-parallel layer reads them and sums
its outputs over the ranks. Attributes of the modules in between (number of heads, width) are divided by the number
of ranks. DeepSpeed's form names the row-parallel layers of a class: {BertLayer: ("attention.output.dense",
"output.dense")}; all other linear layers of the class are then column-parallel. `Cut` names both; layers that it
leaves out are not sharded.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from megatron.config.schema import require
from megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Cut:
    column: Sequence[str] = ()
    row: Sequence[str] = ()
    # Column layers with several concatenated outputs, and their number: {"c_attn": 3} for q, k and v.
    fused: Mapping[str, int] = field(default_factory=dict)
    divide: Sequence[str] = ()  # attributes to divide by the number of ranks: "attention.num_heads"


GPT2_POLICY = Cut(column=("mlp.c_fc",), fused={"attn.c_attn": 3}, row=("attn.c_proj", "mlp.c_proj"),
                  divide=("attn.num_heads", "attn.split_size", "attn.embed_dim"))
_TRANSFORMERS_POLICIES: dict[str, Cut | tuple[str, ...]] = {
    "gpt2.modeling_gpt2.GPT2Block": GPT2_POLICY,
    "bert.modeling_bert.BertLayer": ("attention.output.dense", "output.dense"),
    "t5.modeling_t5.T5Block": ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo"),
    "llama.modeling_llama.LlamaDecoderLayer": ("self_attn.o_proj", "mlp.down_proj"),
    "gpt_neo.modeling_gpt_neo.GPTNeoBlock": ("attention.out_proj", "mlp.c_proj"),
    "gpt_neox.modeling_gpt_neox.GPTNeoXLayer": ("attention.dense", "mlp.dense_4h_to_h"),
    "gptj.modeling_gptj.GPTJBlock": ("attn.out_proj", "mlp.fc_out"),
    "opt.modeling_opt.OPTDecoderLayer": ("self_attn.out_proj", "fc2")}
# Class -> its policy, for models that need no injection_policy.
KNOWN_POLICIES = {f"transformers.models.{name}": cut for name, cut in _TRANSFORMERS_POLICIES.items()}

HEAD_COUNT_NAMES = frozenset("num_heads n_heads n_head num_attention_heads num_attn_heads heads nheads "
                             "num_key_value_heads num_kv_heads n_kv_heads kv_n_heads num_kv n_kv_head".split())
# Divided where they equal the output width of a column layer of the same module.
WIDTH_NAMES = frozenset("all_head_size embed_dim inner_dim split_size hidden_size hidden_dim d_model dim".split())


@dataclass(frozen=True)
class TPLayer:
    path: str
    side: str  # column or row
    num_fused: int = 1


@dataclass(frozen=True)
class TPPlan:
    tp_layers: tuple[TPLayer, ...]
    divided_attributes: tuple[str, ...]
    class_names: tuple[str, ...]  # class names of the policy


def make_tp_plan(model: nn.Module, policy: Mapping[Any, Any] | None) -> TPPlan:
    """The plan of an injection policy; without one, of KNOWN_POLICIES."""
    if policy is None:
        policy = {name: cut for name, cut in KNOWN_POLICIES.items() if any(_is_instance(module, name)
                                                                           for module in model.modules())}
    places, attributes = dict[str, TPLayer](), list[str]()
    for key, value in policy.items():
        cut, name, used = _validate_policy(key, value), _class_name(key), set[str]()
        layers = {path: module for path, module in model.named_modules() if _is_instance(module, key)}
        if not layers:
            names = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names[:8])}"
            raise ConfigError(f"injection_policy: the model has no {name}; {hint}")
        for path, layer in layers.items():
            tp_layers, numbers = _match_layer(layer, cut, not isinstance(value, Cut), name, used)
            for place in tp_layers:
                places.setdefault(_join_path(path, place.path), place)
            attributes += [_join_path(path, number) for number in numbers]
        # a name has to be in one of the layers: T5's encoder lacks what its decoder has
        for wrong in (one for one in (*cut.column, *cut.fused, *cut.row) if one not in used):
            paths = [path for layer in layers.values() for path, _ in layer.named_modules()]
            near = difflib.get_close_matches(wrong, paths, n=1, cutoff=0.5)
            hint = f": did you mean {near[0]}?" if near else ""
            raise ConfigError(f"injection_policy: {name} has no {wrong}{hint}")
        for wrong in (one for one in cut.divide if one not in used):
            raise ConfigError(f"injection_policy: {name} has no number {wrong} to divide")
    return TPPlan(tuple(replace(place, path=path) for path, place in places.items()),
                  tuple(dict.fromkeys(attributes)), tuple(map(_class_name, policy)))


def _match_layer(layer: nn.Module, cut: Cut, infers_columns: bool, class_name: str,
                 used: set[str]) -> tuple[list[TPLayer], list[str]]:
    """The layer's TP layers and attributes, by paths in it; adds the names of the policy that it has to `used`. With
    `infers_columns` all linear layers that are not named are column-parallel, and attributes are divided by their
    names."""
    modules = dict(layer.named_modules(remove_duplicate=False))
    places, attributes = dict[str, TPLayer](), list[str]()

    def paths_of(name: str) -> list[str]:
        return [path for path in modules if f".{path}".endswith(f".{name}") and path]

    columns = {**dict.fromkeys(cut.column, 1), **cut.fused}
    for name in (*columns, *cut.row):
        for path in paths_of(name):
            module, side = modules[path], "column" if name in columns else "row"
            fits = is_linear(module) or side == "column" and type(module) is nn.Embedding
            require(fits, f"injection_policy: {path} of {class_name} is a {type(module).__name__}, which cannot be cut "
                    f"as a {side} layer: name linear layers (nn.Linear or transformers' Conv1D)")
            places.setdefault(path, TPLayer(path, side, columns.get(name, 1)))
            used.add(name)
    for number in cut.divide:
        path, _, name = number.rpartition(".")
        for owner in paths_of(path) if path else [""]:
            if type(vars(modules[owner]).get(name)) is int:
                attributes.append(_join_path(owner, name))
                used.add(number)
    widths = dict[str, set[int]]()  # owner of column layers -> their output widths
    for path, module in modules.items() if infers_columns else ():
        owner = path.rpartition(".")[0]
        # a table with one element per head is one too: the relative position bias of T5
        if path not in places and (is_linear(module) or isinstance(module, nn.Embedding) and any(
                name in HEAD_COUNT_NAMES and value == module.embedding_dim
                for name, value in vars(modules[owner]).items())):
            places[path] = TPLayer(path, "column")
            widths.setdefault(owner, set()).add(in_out_features(module)[1])
    for owner, made in widths.items():
        attributes += [_join_path(owner, name) for name, value in vars(modules[owner]).items() if type(value) is int
                       and (name in HEAD_COUNT_NAMES or name in WIDTH_NAMES and value in made)]
    return [places[path] for path in modules if path in places], attributes


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or transformers' Conv1D, whose weight is [in, out]."""
    return type(module) is nn.Linear or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    return _is_instance(module, "transformers.pytorch_utils.Conv1D")


def in_out_features(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    weight: Any = module.weight
    return (weight.shape[0], weight.shape[1]) if is_conv1d(module) else (weight.shape[1], weight.shape[0])


def _validate_policy(key: Any, value: Any) -> Cut:
    require(isinstance(key, str) or isinstance(key, type) and issubclass(key, nn.Module),
            f"injection_policy: {key!r:.80} is no class of layers")
    if isinstance(value, Cut):
        return value
    names = (value,) if isinstance(value, str) else value  # DeepSpeed takes ".fc2" as well
    require(isinstance(names, (tuple, list)) and bool(names) and all(isinstance(name, str) for name in names),
            f"injection_policy: {_class_name(key)}: {value!r:.80} is not supported; give the names of its row-parallel "
            "layers (those whose outputs are summed over ranks), or megatron.inference.Cut(column=..., row=...)")
    return Cut(row=tuple(name.removeprefix(".") for name in names))


def _is_instance(module: nn.Module, key: type | str) -> bool:
    """`key`: a class, its name, or its full name."""
    cls = type(module)
    return key in (cls, cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def _class_name(key: type | str) -> str:
    return key.rpartition(".")[2] if isinstance(key, str) else key.__name__


def _join_path(*parts: str) -> str:
    return ".".join(part for part in parts if part)
