"""Injection policies: which layers of a module are sharded over tensor parallel ranks, and how.

A column-parallel layer computes some of its output features on each rank; a row-parallel layer reads them and sums
its outputs over the ranks. Attributes of the modules in between (number of heads, width) are divided by the number
of ranks. DeepSpeed's form names the row-parallel layers of a class: {BertLayer: ("attention.output.dense",
"output.dense")}; all other linear layers of the class are then column-parallel. `Cut` names both; layers that it
leaves out are not sharded.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from torch import nn

from megatron.config.schema import require
from megatron.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True)
class Cut:
    column: Sequence[str] = ()
    row: Sequence[str] = ()
    fused: Mapping[str, int] = field(default_factory=dict)
    """Column layers with several concatenated outputs, and their number: {"c_attn": 3} for q, k and v."""
    divide: Sequence[str] = ()
    """Attributes to divide by the number of ranks: "attention.num_heads"."""


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
KNOWN_POLICIES = {f"transformers.models.{name}": cut for name, cut in _TRANSFORMERS_POLICIES.items()}
"""Class -> its policy, for models that need no injection_policy."""

HEAD_COUNT_NAMES = frozenset("num_heads n_heads n_head num_attention_heads num_attn_heads heads nheads "
                             "num_key_value_heads num_kv_heads n_kv_heads kv_n_heads num_kv n_kv_head".split())
WIDTH_NAMES = frozenset("all_head_size embed_dim inner_dim split_size hidden_size hidden_dim d_model dim".split())
"""Divided where they equal the output width of a column layer of the same module."""


@final
@dataclass(frozen=True)
class TPLayer:
    path: str
    side: Literal["column", "row"]
    num_fused: int = 1


@final
@dataclass(frozen=True)
class TPPlan:
    tp_layers: tuple[TPLayer, ...]
    divided_attributes: tuple[str, ...]
    layer_classes: Mapping[str, str]
    """Path of a layer -> its class."""


def make_tp_plan(model: nn.Module, policy: Mapping[Any, Any] | None) -> TPPlan:
    """The plan of an injection policy; without one, of KNOWN_POLICIES."""
    if policy is None:
        policy = {name: cut for name, cut in KNOWN_POLICIES.items() if any(_matches_class(module, name)
                                                                           for module in model.modules())}
    cuts = {key: _validate_policy(key, value) for key, value in policy.items()}
    places, numbers, layers = dict[str, TPLayer](), list[str](), dict[str, str]()
    for key, cut in cuts.items():
        found = [(path, module) for path, module in model.named_modules() if _matches_class(module, key)]
        if not found:
            names = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
            near = difflib.get_close_matches(_class_name(key).rpartition(".")[2], names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names[:8])}"
            raise ConfigError(f"injection_policy: the model has no {_class_name(key)}; {hint}")
        if not isinstance(cut, Cut):
            matchers = [_LayerMatcher(layer, _class_name(key)) for _, layer in found]
            for name in cut:  # in one of the layers: T5's encoder lacks what its decoder has
                if not any(matcher.find_matches(name, "row") for matcher in matchers):
                    matchers[0].require_matches(name, "row")
        for path, layer in found:
            layers[path] = _class_name(key)
            where = f"{path} ({_class_name(key)})" if path else _class_name(key)
            of_layer = _LayerMatcher(layer, where)
            for place in of_layer.find_tp_layers(cut):
                places.setdefault(_join_path(path, place.path),
                                  TPLayer(_join_path(path, place.path), place.side, place.num_fused))
            numbers += [_join_path(path, number) for number in of_layer.find_divided_attributes(cut)]
    return TPPlan(tuple(places.values()), tuple(dict.fromkeys(numbers)), layers)


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or transformers' Conv1D, whose weight is [in, out]."""
    return type(module) is nn.Linear or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    return _qualified_name(type(module)) == "transformers.pytorch_utils.Conv1D"


def in_out_features(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    weight: Any = module.weight
    return (weight.shape[0], weight.shape[1]) if is_conv1d(module) else (weight.shape[1], weight.shape[0])


class _LayerMatcher:
    """Finds the layers and attributes that a policy names within one layer of its class."""

    def __init__(self, layer: nn.Module, location: str) -> None:
        self.modules, self.location = dict(layer.named_modules(remove_duplicate=False)), location

    def find_tp_layers(self, cut: Cut | tuple[str, ...]) -> Iterator[TPLayer]:
        if isinstance(cut, Cut):
            for name, parts in {**dict.fromkeys(cut.column, 1), **cut.fused}.items():
                yield from (TPLayer(path, "column", parts) for path in self.require_matches(name, "column"))
            for name in cut.row:
                yield from (TPLayer(path, "row") for path in self.require_matches(name, "row"))
            return
        rows = {path for name in cut for path in self.find_matches(name, "row")}
        for path, module in self.modules.items():
            if path in rows:
                yield TPLayer(path, "row")
            elif is_linear(module) or self._is_per_head_table(path):
                yield TPLayer(path, "column")

    def find_divided_attributes(self, cut: Cut | tuple[str, ...]) -> Iterator[str]:
        if isinstance(cut, Cut):
            for number in cut.divide:
                path, _, name = number.rpartition(".")
                owners = [owner for owner, module in self.modules.items()
                          if f".{owner}".endswith(f".{path}" if path else "") and type(vars(module).get(name)) is int
                          and (path or not owner)]
                require(bool(owners), f"injection_policy: {self.location} has no number {number} to divide")
                yield from (_join_path(owner, name) for owner in owners)
            return
        columns = [place.path for place in self.find_tp_layers(cut) if place.side == "column"]
        for owner in dict.fromkeys(path.rpartition(".")[0] for path in columns):
            made = {in_out_features(self.modules[path])[1] for path in columns if path.rpartition(".")[0] == owner}
            for name, value in vars(self.modules[owner]).items():
                if type(value) is int and (name in HEAD_COUNT_NAMES or name in WIDTH_NAMES and value in made):
                    yield _join_path(owner, name)

    def _is_per_head_table(self, path: str) -> bool:
        """An embedding with one element per head, such as the relative position bias of T5."""
        table, owner = self.modules[path], self.modules[path.rpartition(".")[0]]
        heads = {value for name, value in vars(owner).items() if name in HEAD_COUNT_NAMES and type(value) is int}
        return isinstance(table, nn.Embedding) and table.embedding_dim in heads

    def require_matches(self, name: str, side: str) -> list[str]:
        found = self.find_matches(name, side)
        near = difflib.get_close_matches(name, self.modules, n=1, cutoff=0.5)
        hint = f": did you mean {near[0]}?" if near else ""
        require(bool(found), f"injection_policy: {self.location} has no {name}{hint}")
        return found

    def find_matches(self, name: str, side: str) -> list[str]:
        found = [path for path in self.modules if f".{path}".endswith(f".{name}") and path]
        for path in found:
            module = self.modules[path]
            fits = is_linear(module) or side == "column" and type(module) is nn.Embedding
            require(fits, f"injection_policy: {path} of {self.location} is a {type(module).__name__}, which cannot be "
                    f"cut as a {side} layer: name linear layers (nn.Linear or transformers' Conv1D)")
        return found


def _validate_policy(key: Any, value: Any) -> Cut | tuple[str, ...]:
    require(isinstance(key, str) or isinstance(key, type) and issubclass(key, nn.Module),
            f"injection_policy: {key!r:.80} is no class of layers")
    if isinstance(value, Cut):
        return value
    names = (value,) if isinstance(value, str) else value  # DeepSpeed takes ".fc2" as well
    require(isinstance(names, (tuple, list)) and bool(names) and all(isinstance(name, str) for name in names),
            f"injection_policy: {_class_name(key)}: {value!r:.80} is not supported; give the names of its row-parallel "
            "layers (those whose outputs are summed over ranks), or megatron.inference.Cut(column=..., row=...)")
    return tuple(name.removeprefix(".") for name in names)


def _matches_class(module: nn.Module, key: Any) -> bool:
    if isinstance(key, str):
        return key in (type(module).__name__, _qualified_name(type(module)))
    return type(module) is key


def _class_name(key: Any) -> str:
    return key.rpartition(".")[2] if isinstance(key, str) else str(key.__name__)


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _join_path(*parts: str) -> str:
    return ".".join(part for part in parts if part)
