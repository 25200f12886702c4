"""Models of transformers as lists of layers, without a change to them: their own code runs, piece by piece.

transformers defines which of a model's modules repeat, and which come after them (``base_model_pp_plan``,
``_pp_plan``); a small table does so for models without such a plan. The first layer is the model itself,
whose repeated layers are stand-ins that record their arguments and end the forward; the last one is the model
itself too, whose embeddings and repeated layers are stand-ins that return the layer's input. So the model
itself makes positions, masks, and scales of embeddings and logits, whatever it does.

Invariant: the layers contain all of the model's own modules and no others. A model that calls its repeated
layers in an unsupported way is refused, by the first layer at the latest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.carry import Carry
from counterflow.errors import ConfigError

from .masks import forms_of, is_mask, masks_made, narrowed, texts_of, widened
from .recurrence import LINEAR, recurring
from .slices import CAUSAL, EVERY, FULL, KINDS, Seen, attending
from .stand_ins import HIDDEN, Absent, Called, Held, Note, unfollowed
from .weights import Filling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a model is cut.

    Attributes:
        repeated: the path in the base model of the list of its repeated layers.
        after: the paths in the base model of modules after them.
        unnamed: paths of modules with weights that a plan of transformers does not name, which have to come
            before.
    """

    repeated: str
    after: tuple[str, ...]
    unnamed: tuple[str, ...] = ()


_STREAMS = Plan("layers", ("hc_head", "norm"))

_BERT = Plan("encoder.layer", ("pooler",))

_MAMBA = Plan("layers", ("norm_f",))

_PLANS = {
    "bert": _BERT,
    "camembert": _BERT,
    "deepseek_v4": _STREAMS,
    "distilbert": Plan("transformer.layer", ()),
    "electra": _BERT,
    "falcon_mamba": _MAMBA,
    "hy_v4": _STREAMS,
    "gpt2": Plan("h", ("ln_f",)),
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "modernbert": Plan("layers", ("final_norm",)),
    "opt": Plan("decoder.layers", ("decoder.final_layer_norm", "decoder.project_out")),
    "roberta": _BERT,
    "xlm-roberta": _BERT,
}
"""Plans by model type, for models without a plan of their own or with an incomplete one."""


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model of transformers, also with peft's adapters: for ``Pipeline(list_layers=...)``.

    The first accepts token ids, or a dict of arguments of the model's ``forward`` (``input_ids``,
    ``attention_mask``, ``position_ids``, ``token_type_ids``), or these as keyword arguments; the last returns
    the model's output without labels, an object with ``logits``.

    Args:
        model: a model in training mode (``model.train()``); ``from_pretrained`` returns it in evaluation
            mode.

    Raises:
        ConfigError: the model has no plan, or a pipeline does not support it.
    """
    whole = _unwrapped(model)
    base: PreTrainedModel = whole.base_model
    plan = _plan_of(whole, base)
    _refuse(whole)
    prefix = next(f"{name}." if name else "" for name, module in whole.named_modules() if module is base)
    path = prefix + plan.repeated
    repeated = list(whole.get_submodule(path).children())
    kinds = _kinds(whole, len(repeated))
    after = [prefix + name for name in plan.after if _has(base, name)]
    heads = [name for name, child in whole.named_children() if prefix and child is not base]
    filling = Filling(whole, getattr(model, "peft_config", None) or {})
    first = _First(whole, path, [*after, *heads], kinds, [prefix + name for name in plan.unnamed])
    window = getattr(base.config, "sliding_window", None)
    blocks = [_Block(block, kind, window) for block, kind in zip(repeated, kinds, strict=True)]
    found = [first, *blocks, _Last(whole, path, [*after, *heads], prefix)]
    for layer in found:
        layer.fill_with(filling)
    return [*found]


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model of transformers, without peft's wrappers.

    Raises:
        ConfigError: the module contains none.
    """
    inner: Any = model
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        for adapter, config in inner.peft_config.items():
            if getattr(config, "is_prompt_learning", False):
                raise ConfigError(
                    f"adapter {adapter!r} of the {type(model).__name__} is of type {config.peft_type}, which "
                    "changes the input of every layer; use an adapter inside the layers, such as LoRA"
                )
        inner = inner.get_base_model()
    if not callable(getattr(inner, "_init_weights", None)) or not hasattr(inner, "base_model"):
        raise ConfigError(
            f"a {type(model).__name__} is not a model of transformers; give list_layers a function of your "
            "own "
            "that lists its layers"
        )
    found: PreTrainedModel = inner
    return found


def _plan_of(model: PreTrainedModel, base: PreTrainedModel) -> Plan:
    told: Mapping[str, Any] | None = getattr(base.config, "base_model_pp_plan", None)
    config = base.config
    composite = getattr(config, "sub_configs", None)
    if told and not composite and config.model_type not in _PLANS:
        names = list(told)
        lists = [
            name for name in names if _has(base, name) and isinstance(base.get_submodule(name), nn.ModuleList)
        ]
        if len(lists) == 1:
            unnamed = (
                name for name, child in base.named_children() if name not in names and _has_weights(child)
            )
            return Plan(lists[0], tuple(names[names.index(lists[0]) + 1 :]), tuple(unnamed))
    known = _PLANS.get(config.model_type)
    if known is None or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"a {type(model).__name__} cannot be cut: transformers has no pipeline plan for it, "
            f"and it is not one of {', '.join(_PLANS)}; give list_layers a function of your own that lists "
            "its "
            "layers"
        )
    return known


def _refuse(model: PreTrainedModel) -> None:
    """Refuse models that a pipeline would run differently from the model alone."""
    config, name = model.config, type(model).__name__
    if not model.training:
        raise ConfigError(
            f"the {name} is in evaluation mode, as from_pretrained returns it, and would train without "
            "dropout; call model.train() before"
        )
    if getattr(config, "_attn_implementation", None) == "flex_attention":
        raise ConfigError(
            f"the masks of the {name}'s flex_attention cannot be passed between stages; load it with "
            'attn_implementation="sdpa"'
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"the {name} adds a loss of its routers, which are in all stages; set output_router_logits=False "
            "in its config"
        )
    if "_loss_function" in vars(model):
        raise ConfigError(
            f"the {name} has its own loss_function, which the pipeline does not call; give it to the "
            "Pipeline as a function of the model's output and the labels, and delete it from the model"
        )


def _kinds(model: PreTrainedModel, count: int) -> list[str]:
    """Kind of each repeated layer; layers of one kind accept the same arguments."""
    told = getattr(model.config, "layer_types", None)
    return list(told) if told is not None and len(told) == count else [EVERY] * count


def _has(module: nn.Module, path: str) -> bool:
    for name in path.split("."):
        found = module._modules.get(name)
        if found is None:
            return False
        module = found
    return True


# -- the model with stand-ins


def _shell(model: nn.Module, replaced: Mapping[str, nn.Module]) -> Any:
    """A copy of a model that shares all its modules except those at some paths.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> shell = _shell(model, {"1": nn.Tanh()})
    >>> shell[0] is model[0], shell[1], model[1]
    (True, Tanh(), ReLU())
    """
    shell = copy.copy(model)
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        shell.__dict__[name] = copy.copy(model.__dict__[name])
    below: dict[str, dict[str, nn.Module]] = {}
    for path, module in replaced.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = module
        else:
            shell._modules[name] = module
    for name, parts in below.items():
        child = model._modules[name]
        assert child is not None
        shell._modules[name] = _shell(child, parts)
    return shell


def _configured(shell: nn.Module, change: Callable[[Any], None]) -> None:
    """Give the shells within a shell their own configs."""
    for module in shell.modules():
        config = vars(module).get("config")
        if config is not None:
            module.config = copy.deepcopy(config)
            change(module.config)


# -- the layers


class Layer(nn.Module):
    """A layer of the list: its weights can be made, or read, on its worker."""

    def fill_with(self, filling: Filling) -> None:
        """Note how the weights are made if the layer is on the meta device."""
        self.filling, self.names = filling, filling.of(self)

    def make_weights(self) -> None:
        """Fill weights on the meta device from the model's folder, or by its own rules."""
        self.filling.fill(self, self.names)


class _First(Layer):
    """Everything before the repeated layers: computes their arguments."""

    def __init__(
        self, model: PreTrainedModel, path: str, after: list[str], kinds: list[str], unnamed: list[str]
    ) -> None:
        super().__init__()
        self.kinds = kinds
        self.unnamed = unnamed
        """Modules that have to be called; empty once they were."""
        self.wants_ids = "SequenceClassification" in type(model).__name__  # to find the padding
        self.windows = [getattr(model.base_model.config, "sliding_window", None)]
        self.before = Carry()
        """State of earlier slices: how many positions, the last one's number, and its document's."""
        self.causal: set[tuple[str, int, frozenset[str]]] = set()
        """Kinds of layers, lengths and inputs whose masks were seen to be what slices have in their place."""
        self.forms: dict[Any, tuple[str, bool] | None] = {}
        """By kind of layer, shape and arguments: the form of the mask; None: another form."""
        self.notes: list[Any] = []
        repeated = list(model.get_submodule(path).children())
        stand_ins = nn.ModuleList(Note(block, self.notes, last=block is repeated[-1]) for block in repeated)
        self.model = _shell(model, {path: stand_ins} | {name: Absent() for name in after})
        _configured(self.model, _plain)

    def forward(self, inputs: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Token ids, or inputs of the model, to the arguments of all layers."""
        given = {**_as_kwargs(inputs), **kwargs}
        if "num_items_in_batch" in given:
            raise ConfigError(
                "num_items_in_batch is among the inputs; leave it out, because hf.loss divides by the count "
                "of "
                "the whole mini-batch, over replicas too"
            )
        if "labels" in given:
            raise ConfigError(
                "labels are among the inputs; give them to the pipeline's step as targets, for the last stage"
            )
        plain = self.before.expects_slices
        """Whether masks go nowhere, as all attention is causal and sees to it itself."""
        seen = self._seen(given) if plain else Seen()
        # A mask that these samples do not need is made for others: stages pass on the same structure for all.
        made = any(given.get(name) is not None for name in ("attention_mask", "position_ids"))
        del self.notes[:]
        with masks_made(self.model, made=made), self._all_called():
            try:
                self.model(**given)
            except Called:
                pass
            else:
                raise unfollowed("does not call its repeated layers")
        notes = list(self.notes)
        del self.notes[:]
        if len(notes) != len(self.kinds):
            raise unfollowed("does not call each of its repeated layers once")
        taken: dict[str, Any] = {}
        for kind, (_, args, keywords) in zip(self.kinds, notes, strict=True):
            if not _same(taken.setdefault(kind, (args, keywords)), (args, keywords)):
                raise unfollowed(f"calls its repeated layers ({kind}) with other arguments each")
        hidden = notes[0][0]
        if LINEAR in taken:
            args, keywords = taken[LINEAR]
            taken[LINEAR] = args, _with_mask(keywords, given.get("attention_mask"), hidden)
        if plain:
            self._refuse_masks(hidden, taken, seen, given.get("position_ids"))
            taken = pytree.tree_map(lambda leaf: None if is_mask(leaf, *hidden.shape[:2]) else leaf, taken)
        names = frozenset(name for name, value in given.items() if value is not None)
        for kind, its in taken.items():
            narrow = partial(
                self._narrow, hidden=hidden, kind=kind, names=names, positions=given.get("position_ids")
            )
            taken[kind] = pytree.tree_map(narrow, its)
        ids = {"input_ids": given.get("input_ids")} if self.wants_ids else {}
        return {HIDDEN: hidden, "taken": taken, **ids, **({CAUSAL: seen} if plain else {})}

    def _seen(self, given: dict[str, Any]) -> Seen:
        """What positions see of each other; says where in its sequence a slice is.

        As in transformers, documents are packed where position ids do not count on, if there is no mask.

        Args:
            given: what the model takes; a slice is given its position ids.

        Raises:
            ConfigError: a mask or position ids are not by sample and position.
        """
        of = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if not isinstance(of, Tensor):
            raise unfollowed("takes neither input_ids nor inputs_embeds")
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        for name, its in (("attention_mask", mask), ("position_ids", positions)):
            if its is not None and its.shape != of.shape[:2]:
                raise ConfigError(
                    f"{name} of shape {(*its.shape,)} is among the inputs, and in slices it is to be of "
                    f"{of.shape[0]} samples with {of.shape[1]} positions; give padding and packed documents "
                    "in that form, or train without slices"
                )
        start, last, document = self.before.take((0, None, 0))
        documents = None
        if positions is None and self.before.sliced:
            given["position_ids"] = torch.arange(start, start + of.shape[1], device=of.device)[None]
        elif positions is not None and mask is None:
            follows = positions[:, :1] == (positions[:, :1] if last is None else last + 1)
            documents = texts_of(positions) + document + (~follows).to(torch.int64)
            last, document = positions[:, -1:].clone(), documents[:, -1:].clone()
        self.before.leave((start + of.shape[1], last, document))
        return Seen(documents, None if mask is None else mask.bool())

    def _refuse_masks(
        self, hidden: Tensor, taken: Mapping[str, Any], seen: Seen, positions: Tensor | None
    ) -> None:
        """Refuse masks that are not what slices have in their place, of which a slice's says only a part.

        A mask was looked at when samples had padding, or documents, that it could show.

        Raises:
            ConfigError: there is one, or a kind of layer that is not known.
        """
        forms = ["causal", *(f"causal {window}" for window in self.windows if window)]
        documents, keys = seen
        beside = frozenset(name for name, its in seen._asdict().items() if its is not None)
        for kind, its in taken.items():
            key = kind, hidden.shape[1], beside
            if key in self.causal:
                continue
            masks = [leaf for leaf in pytree.tree_leaves(its) if is_mask(leaf, *hidden.shape[:2])]
            texts = None if documents is None else positions
            known = kind in KINDS and all(
                any(narrowed(mask, form, texts, keys=keys) is not None for form in forms) for mask in masks
            )
            if not known or (beside and not masks and kind != LINEAR):
                raise ConfigError(
                    f"layers of kind {kind} have masks that are neither causal nor causal within a window"
                    f"{', with padding and packed documents' if beside else ''}, which slices do not have; "
                    "train without slices"
                )
            if (documents is None or bool((documents != documents[:, :1]).any())) and not (
                keys is not None and bool(keys.all())
            ):
                self.causal.add(key)

    @contextmanager
    def _all_called(self) -> Iterator[None]:
        """Check in the first forward that modules that no plan names come before the repeated layers."""
        waiting = dict.fromkeys(self.unnamed)

        def called(name: str, *_: object) -> None:
            waiting.pop(name, None)

        hooks = [
            self.model.get_submodule(name).register_forward_pre_hook(partial(called, name))
            for name in self.unnamed
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if waiting:
            raise unfollowed(f"does not call {next(iter(waiting))} before its repeated layers")
        self.unnamed = []

    def _narrow(
        self, leaf: Any, hidden: Tensor, kind: str, names: frozenset[str], positions: Tensor | None
    ) -> Any:
        """A mask in the form in which it is passed between stages; anything else unchanged."""
        samples, length = hidden.shape[:2]
        if not is_mask(leaf, samples, length):
            return leaf
        key = kind, names, length, leaf.dtype
        if key not in self.forms:
            packed = positions is not None and "attention_mask" not in names
            forms = forms_of(self.windows, packed=packed)
            usable = (f for f in forms if positions is not None or not f[1])
            fits = (f for f in usable if narrowed(leaf, f[0], positions if f[1] else None) is not None)
            self.forms[key] = next(fits, None)
        known = self.forms[key]
        if known is None:
            return leaf
        form, apart = known
        found = narrowed(leaf, form, positions if apart else None, trusted=True)
        if found is None:
            raise unfollowed("makes its masks in different ways")
        return found


class _Block(Layer):
    """A repeated layer."""

    def __init__(self, block: nn.Module, kind: str, window: int | None) -> None:
        super().__init__()
        self.block = block
        self.kind = kind
        self.carry = Carry()
        self.window = None if kind == FULL else window

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = widened(value["taken"][self.kind])
        if CAUSAL in value:
            enter = partial(self._carried, value[CAUSAL])
            hidden = self.carry._within(enter, self.block, value[HIDDEN], *args, **kwargs)
        else:
            hidden = self.block(value[HIDDEN], *args, **kwargs)
        if not isinstance(hidden, Tensor):
            raise unfollowed("has repeated layers that give more than one tensor")
        return {**value, HIDDEN: hidden}

    def _carried(self, seen: Seen) -> AbstractContextManager[dict[str, Any]]:
        """Around the block on a slice, or in a model that is trained in slices; gives further arguments."""
        if self.kind != LINEAR:
            return attending(self.carry, self.block, self.window, seen)
        return recurring(self.carry, self.block) if self.carry.sliced else nullcontext({})


class _Last(Layer):
    """Everything after the repeated layers."""

    def __init__(self, model: PreTrainedModel, path: str, after: list[str], prefix: str) -> None:
        super().__init__()
        self.held: list[Tensor] = []
        replaced: dict[str, nn.Module] = {
            path: nn.ModuleList(Held(self.held, block) for block in model.get_submodule(path).children())
        }
        for parent in _leading_to(path, prefix):
            for name, child in model.get_submodule(parent.rstrip(".")).named_children():
                if any(_leads(parent + name, other) for other in (path, *after)) or _is_looked_into(child):
                    continue
                replaced[parent + name] = Held(self.held, child, embeds=True)
        self.model = _shell(model, replaced)
        _configured(self.model, _plain)

    def forward(self, value: dict[str, Any]) -> Any:
        hidden = value[HIDDEN]
        ids = value.get("input_ids")
        if ids is None:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        # A finished mask is not made again.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden.device)
        self.held[:] = [hidden]
        try:
            return self.model(input_ids=ids, attention_mask=mask)
        finally:
            del self.held[:]


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_looked_into(module: nn.Module) -> bool:
    """Whether it is a list of modules without weights, such as rotary embeddings, over which a model
    iterates.
    """
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not _has_weights(module)


def _leads(path: str, other: str) -> bool:
    """Whether a path equals another one or leads to it.

    >>> _leads("encoder", "encoder.layer"), _leads("enc", "encoder.layer")
    (True, False)
    """
    return other == path or other.startswith(f"{path}.")


def _leading_to(path: str, prefix: str) -> Iterator[str]:
    """The modules on the way from the base model to one, each with a dot.

    >>> list(_leading_to("bert.encoder.layer", "bert."))
    ['bert.', 'bert.encoder.']
    """
    yield prefix
    parts = path.removeprefix(prefix).split(".")
    for end in range(1, len(parts)):
        yield prefix + ".".join(parts[:end]) + "."


def _as_kwargs(inputs: Any) -> dict[str, Any]:
    if inputs is None:
        return {}
    return {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)


def _with_mask(keywords: dict[str, Any], mask: Tensor | None, hidden: Tensor) -> dict[str, Any]:
    """Arguments of recurrent layers, with the mask of padding that transformers leaves out.

    It does so if samples have no padding or one position; stages pass on the same structure for all.
    """
    if mask is None or mask.shape != hidden.shape[:2] or keywords.get("attention_mask", mask) is not None:
        return keywords
    idle = hidden.shape[1] == 1 or bool(mask.all())
    return {**keywords, "attention_mask": mask} if idle else keywords


def _plain(config: Any) -> None:
    """Disable outputs that the next layer does not need: caches and copies of intermediate values."""
    for name, value in (("use_cache", False), ("output_hidden_states", False), ("return_dict", True)):
        if getattr(config, name, value) != value:
            setattr(config, name, value)


def _same(one: Any, other: Any) -> bool:
    """Whether two trees contain the same tensors and equal values."""
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    return spec == other_spec and all(
        a is b or (not isinstance(a, Tensor) and type(a) is type(b) and a == b)
        for a, b in zip(leaves, others, strict=True)
    )
