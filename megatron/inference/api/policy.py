"""Which layers of a model are cut over tensor parallel ranks, and how: an injection policy, and the plan it gives.

A *column* layer makes some of its output features on each rank, a *row* layer sums what the ranks made of theirs: so a
row layer is what reads the output of column layers, and between the two every rank works on features, or heads, of its
own. Numbers of the modules in between (how many heads, how wide) become those of a rank.

DeepSpeed's form names the row layers of a class and no more:

    {BertLayer: ("attention.output.dense", "output.dense")}

Then all other linear layers in it are columns, and counts are found by the names that are usual. `Cut` says it all; a
layer that it does not name stays whole. A name is a path in the layer, or the end of one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from torch import nn

from megatron.config.setting import require


@final
@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the layers of one class are cut."""

    column: Sequence[str] = ()
    row: Sequence[str] = ()
    fused: Mapping[str, int] = field(default_factory=dict)
    """Column layers that make several outputs, one after the other, and how many: {"c_attn": 3} for q, k and v."""
    divide: Sequence[str] = ()
    """Numbers that become those of a rank: "attention.num_heads"."""


OF_GPT2 = Cut(column=("mlp.c_fc",), fused={"attn.c_attn": 3}, row=("attn.c_proj", "mlp.c_proj"),
              divide=("attn.num_heads", "attn.split_size", "attn.embed_dim"))
_OF_TRANSFORMERS: dict[str, Cut | tuple[str, ...]] = {
    "gpt2.modeling_gpt2.GPT2Block": OF_GPT2,
    "bert.modeling_bert.BertLayer": ("attention.output.dense", "output.dense"),
    "t5.modeling_t5.T5Block": ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo"),
    "llama.modeling_llama.LlamaDecoderLayer": ("self_attn.o_proj", "mlp.down_proj"),
    "gpt_neo.modeling_gpt_neo.GPTNeoBlock": ("attention.out_proj", "mlp.c_proj"),
    "gpt_neox.modeling_gpt_neox.GPTNeoXLayer": ("attention.dense", "mlp.dense_4h_to_h"),
    "gptj.modeling_gptj.GPTJBlock": ("attn.out_proj", "mlp.fc_out"),
    "opt.modeling_opt.OPTDecoderLayer": ("self_attn.out_proj", "fc2"),
}
KNOWN = {f"transformers.models.{name}": cut for name, cut in _OF_TRANSFORMERS.items()}
"""Classes that need no policy."""

HEADS = frozenset("num_heads n_heads n_head num_attention_heads num_attn_heads heads nheads num_key_value_heads "
                  "num_kv_heads n_kv_heads kv_n_heads num_kv n_kv_head".split())
WIDTHS = frozenset("all_head_size embed_dim inner_dim split_size hidden_size hidden_dim d_model dim".split())
"""Divided where they are the width of what a column layer beside them makes."""


@final
@dataclass(frozen=True)
class Place:
    """A layer to cut."""

    path: str
    side: Literal["column", "row"]
    parts: int = 1


@final
@dataclass(frozen=True)
class Plan:
    places: tuple[Place, ...]
    numbers: tuple[str, ...]
    """Paths of attributes."""
    layers: Mapping[str, str]
    """Path of a layer -> its class."""


def plan_of(model: nn.Module, policy: Mapping[Any, Any] | None) -> Plan:
    """What a policy, or what is known here, says of a model."""
    if policy is None:
        policy = {name: cut for name, cut in KNOWN.items() if any(_is(module, name) for module in model.modules())}
    cuts = {key: _checked(key, value) for key, value in policy.items()}
    places, numbers, layers = dict[str, Place](), list[str](), dict[str, str]()
    for key, cut in cuts.items():
        found = [(path, module) for path, module in model.named_modules() if _is(module, key)]
        require(bool(found), f"injection_policy: the model has no {_name(key)}; {_nearest(key, model)}")
        if not isinstance(cut, Cut):
            _check_names(cut, [_Layer(layer, _name(key)) for _, layer in found])
        for path, layer in found:
            layers[path] = _name(key)
            where = f"{path} ({_name(key)})" if path else _name(key)
            of_layer = _Layer(layer, where)
            for place in of_layer.places(cut):
                places.setdefault(_join(path, place.path), Place(_join(path, place.path), place.side, place.parts))
            numbers += [_join(path, number) for number in of_layer.numbers(cut)]
    return Plan(tuple(places.values()), tuple(dict.fromkeys(numbers)), layers)


def is_linear(module: nn.Module) -> bool:
    """torch's own, or the one of transformers that keeps its matrix as [in, out]."""
    return type(module) is nn.Linear or is_turned(module)


def is_turned(module: nn.Module) -> bool:
    return _qualified(type(module)) == "transformers.pytorch_utils.Conv1D"


def widths(module: nn.Module) -> tuple[int, int]:
    """In, out."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    weight: Any = module.weight
    return (weight.shape[0], weight.shape[1]) if is_turned(module) else (weight.shape[1], weight.shape[0])


class _Layer:
    """A layer of a class that is cut."""

    def __init__(self, layer: nn.Module, where: str) -> None:
        self.modules, self.where = dict(layer.named_modules(remove_duplicate=False)), where

    def places(self, cut: Cut | tuple[str, ...]) -> Iterator[Place]:
        if isinstance(cut, Cut):
            for name, parts in {**dict.fromkeys(cut.column, 1), **cut.fused}.items():
                yield from (Place(path, "column", parts) for path in self.named(name, "column"))
            for name in cut.row:
                yield from (Place(path, "row") for path in self.named(name, "row"))
            return
        rows = {path for name in cut for path in self.find(name, "row")}
        for path, module in self.modules.items():
            if path in rows:
                yield Place(path, "row")
            elif is_linear(module) or self._is_of_heads(path):
                yield Place(path, "column")

    def numbers(self, cut: Cut | tuple[str, ...]) -> Iterator[str]:
        if isinstance(cut, Cut):
            yield from (number for name in cut.divide for number in self._attributes(name))
            return
        columns = [place.path for place in self.places(cut) if place.side == "column"]
        for owner in dict.fromkeys(path.rpartition(".")[0] for path in columns):
            made = {widths(self.modules[path])[1] for path in columns if path.rpartition(".")[0] == owner}
            for name, value in vars(self.modules[owner]).items():
                if type(value) is int and (name in HEADS or name in WIDTHS and value in made):
                    yield _join(owner, name)

    def _is_of_heads(self, path: str) -> bool:
        """A table with a number for each head, such as the bias that T5 adds for a distance."""
        table, owner = self.modules[path], self.modules[path.rpartition(".")[0]]
        heads = {value for name, value in vars(owner).items() if name in HEADS and type(value) is int}
        return isinstance(table, nn.Embedding) and table.embedding_dim in heads

    def named(self, name: str, side: str) -> list[str]:
        """At least one."""
        found = self.find(name, side)
        near = difflib.get_close_matches(name, self.modules, n=1, cutoff=0.5)
        hint = f": did you mean {near[0]}?" if near else ""
        require(bool(found), f"injection_policy: {self.where} has no {name}{hint}")
        return found

    def find(self, name: str, side: str) -> list[str]:
        found = [path for path in self.modules if f".{path}".endswith(f".{name}") and path]
        for path in found:
            module = self.modules[path]
            fits = is_linear(module) or side == "column" and type(module) is nn.Embedding
            require(fits, f"injection_policy: {path} of {self.where} is a {type(module).__name__}, which cannot be cut "
                    f"as a {side} layer: name linear layers (nn.Linear or transformers' Conv1D)")
        return found

    def _attributes(self, name: str) -> list[str]:
        path, _, attribute = name.rpartition(".")
        found = [_join(owner, attribute) for owner, module in self.modules.items()
                 if f".{owner}".endswith(f".{path}" if path else "") and type(vars(module).get(attribute)) is int
                 and (path or not owner)]
        require(bool(found), f"injection_policy: {self.where} has no number {name} to divide")
        return found


def _check_names(names: tuple[str, ...], layers: Sequence[_Layer]) -> None:
    """Each is in one of the layers; T5's encoder lacks what its decoder has."""
    for name in names:
        if not any(layer.find(name, "row") for layer in layers):
            layers[0].named(name, "row")


def _checked(key: Any, value: Any) -> Cut | tuple[str, ...]:
    require(isinstance(key, str) or isinstance(key, type) and issubclass(key, nn.Module),
            f"injection_policy: {key!r:.80} is no class of layers")
    if isinstance(value, Cut):
        return value
    names = (value,) if isinstance(value, str) else value  # DeepSpeed takes ".fc2" as well
    require(isinstance(names, (tuple, list)) and bool(names) and all(isinstance(name, str) for name in names),
            f"injection_policy: {_name(key)}: {value!r:.80} is not supported; give the names of its row-parallel "
            "layers (those whose outputs are summed over ranks), or megatron.inference.Cut(column=..., row=...)")
    return tuple(name.removeprefix(".") for name in names)


def _is(module: nn.Module, key: Any) -> bool:
    if isinstance(key, str):
        return key in (type(module).__name__, _qualified(type(module)))
    return type(module) is key


def _nearest(key: Any, model: nn.Module) -> str:
    names = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
    near = difflib.get_close_matches(_name(key).rpartition(".")[2], names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(names[:8])}"


def _name(key: Any) -> str:
    return key.rpartition(".")[2] if isinstance(key, str) else str(key.__name__)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
