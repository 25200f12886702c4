"""The first layer of a model: everything before its repeated layers, whose arguments it computes.

It is the model itself, whose repeated layers are stand-ins that record their arguments and end the forward,
so the model itself makes positions, masks, and scales of embeddings, whatever it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.carry import Carry
from counterflow.api.contexts import gathered, share_sequence
from counterflow.errors import ConfigError

from .attention_masks import forms_of, is_mask, masks_made, narrowed, texts_of
from .recurrence import LINEAR
from .routers import COUNTED, RouterLoss
from .shells import disable_extras, shell_of
from .slice_attention import CAUSAL, KINDS, Seen
from .stand_ins import HIDDEN, Absent, Called, Note, unfollowed
from .weight_files import Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FirstLayer(Layer):
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
        """Forms of masks by kind of layer, shape and arguments; None: another form."""
        self.notes: list[Any] = []
        self.routers: RouterLoss | None = None
        repeated = list(model.get_submodule(path).children())
        stand_ins = nn.ModuleList(Note(block, self.notes, last=block is repeated[-1]) for block in repeated)
        self.model = shell_of(model, {path: stand_ins} | {name: Absent() for name in after})
        disable_extras(self.model)

    def forward(self, inputs: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Token ids, or inputs of the model, to the arguments of all layers."""
        arguments = {**_as_kwargs(inputs), **kwargs}
        if "num_items_in_batch" in arguments:
            raise ConfigError(
                "num_items_in_batch is among the inputs; leave it out, because hf.loss divides by the count "
                "of "
                "the whole mini-batch, over replicas too"
            )
        if "labels" in arguments:
            raise ConfigError(
                "labels are among the inputs; give them to the pipeline's step as targets, for the last stage"
            )
        shares = self.before.context is not None
        plain = self.before.expects_slices or shares
        """True if masks go nowhere, as all attention is causal and sees to it itself."""
        seen = self._seen(arguments) if plain else Seen()
        # A mask that these samples do not need is made for others: stages pass on the same structure for all.
        needed = any(arguments.get(name) is not None for name in ("attention_mask", "position_ids"))
        del self.notes[:]
        with masks_made(self.model, required=needed), self._all_called():
            try:
                self.model(**arguments)
            except Called:
                pass
            else:
                raise unfollowed("does not call its repeated layers")
        notes = list(self.notes)
        del self.notes[:]
        if len(notes) != len(self.kinds):
            raise unfollowed("does not call each of its repeated layers once")
        layer_arguments: dict[str, Any] = {}
        for kind, (_, args, keywords) in zip(self.kinds, notes, strict=True):
            if not _same(layer_arguments.setdefault(kind, (args, keywords)), (args, keywords)):
                raise unfollowed(f"calls its repeated layers ({kind}) with other arguments each")
        hidden = notes[0][0]
        if LINEAR in layer_arguments:
            args, keywords = layer_arguments[LINEAR]
            layer_arguments[LINEAR] = args, _with_mask(keywords, arguments.get("attention_mask"), hidden)
        if plain:
            # Documents of a share are separated by attention here: the model's masks have padding alone.
            limits = Seen(None, arguments["attention_mask"].bool()) if shares else seen
            self._refuse_masks(
                hidden, layer_arguments, limits, None if shares else arguments.get("position_ids")
            )
            layer_arguments = pytree.tree_map(
                lambda leaf: None if is_mask(leaf, *hidden.shape[:2]) else leaf, layer_arguments
            )
        names = frozenset(name for name, value in arguments.items() if value is not None)
        for kind, kind_arguments in layer_arguments.items():
            narrow = partial(
                self._narrow, hidden=hidden, kind=kind, names=names, positions=arguments.get("position_ids")
            )
            layer_arguments[kind] = pytree.tree_map(narrow, kind_arguments)
        ids = {"input_ids": arguments.get("input_ids")} if self.wants_ids else {}
        ids |= {} if self.routers is None else {COUNTED: arguments.get("attention_mask")}
        return {HIDDEN: hidden, "taken": layer_arguments, **ids, **({CAUSAL: seen} if plain else {})}

    @staticmethod
    def _embedded(arguments: dict[str, Any]) -> Tensor:
        ids = arguments.get("input_ids")
        of = ids if ids is not None else arguments.get("inputs_embeds")
        if not isinstance(of, Tensor):
            raise unfollowed("takes neither input_ids nor inputs_embeds")
        for name in ("attention_mask", "position_ids"):
            value = arguments.get(name)
            if value is not None and value.shape != of.shape[:2]:
                raise ConfigError(
                    f"{name} of shape {(*value.shape,)} is among the inputs, and in slices it is to be of "
                    f"{of.shape[0]} samples with {of.shape[1]} positions; give padding and packed documents "
                    "in that form, or train without slices"
                )
        return of

    def _seen(self, arguments: dict[str, Any]) -> Seen:
        """Limits of what positions see of each other; gives the model the numbers of positions.

        As in transformers, documents are packed where position ids do not count on, if there is no mask.

        Args:
            arguments: what the model takes; a slice, or a share, is given its position ids.

        Raises:
            ConfigError: a mask or position ids are not by sample and position.
        """
        if self.routers is not None:
            raise ConfigError(
                "output_router_logits: the loss of routers is a product of means over all tokens, which "
                "slices and shares of sequences do not have; set it to False, or train whole sequences"
            )
        of, before = self._embedded(arguments), self.before
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        start, last, document = before.take_of_share((0, None, 0))
        documents = None
        if positions is None and (before.sliced or before.context is not None):
            numbers = before.positions(of.shape[1], start, of.device)
            arguments["position_ids"] = numbers[None]
        elif positions is not None and mask is None:
            context = before.run_context
            if context is not None:
                positions = gathered(positions, context, 1)
            follows = positions[:, :1] == (positions[:, :1] if last is None else last + 1)
            documents = texts_of(positions) + document + (~follows).to(torch.int64)
            last, document = positions[:, -1:].clone(), documents[:, -1:].clone()
            if context is not None:
                documents = share_sequence(documents, context.share)
        if mask is None and before.context is not None:
            # Else the model would begin a document where a share's tail follows its head.
            arguments["attention_mask"] = torch.ones(of.shape[:2], dtype=torch.int64, device=of.device)
        before.leave_of_share((start + of.shape[1], last, document))
        return Seen(documents, None if mask is None else mask.bool())

    def _refuse_masks(
        self, hidden: Tensor, layer_arguments: Mapping[str, Any], seen: Seen, positions: Tensor | None
    ) -> None:
        """Refuse masks that are not what slices have in their place, of which a slice's says only a part.

        A mask was looked at when samples had padding, or documents, that it could show.

        Raises:
            ConfigError: there is one, or a kind of layer that is not known.
        """
        forms = ["causal", *(f"causal {window}" for window in self.windows if window)]
        documents, keys = seen
        extras = frozenset(name for name, value in seen._asdict().items() if value is not None)
        for kind, kind_arguments in layer_arguments.items():
            key = kind, hidden.shape[1], extras
            if key in self.causal:
                continue
            masks = [leaf for leaf in pytree.tree_leaves(kind_arguments) if is_mask(leaf, *hidden.shape[:2])]
            texts = None if documents is None else positions
            known = kind in KINDS and all(
                any(narrowed(mask, form, texts, keys=keys) is not None for form in forms) for mask in masks
            )
            if not known or (extras and not masks and kind != LINEAR):
                raise ConfigError(
                    f"layers of kind {kind} have masks that are neither causal nor causal within a window"
                    f"{', with padding and packed documents' if extras else ''}, which slices do not have; "
                    "train without slices"
                )
            if (documents is None or bool((documents != documents[:, :1]).any())) and not (
                keys is not None and bool(keys.all())
            ):
                self.causal.add(key)

    @contextmanager
    def _all_called(self) -> Iterator[None]:
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
        form, separate = known
        narrow = narrowed(leaf, form, positions if separate else None, trusted=True)
        if narrow is None:
            raise unfollowed("makes its masks in different ways")
        return narrow


def _as_kwargs(inputs: Any) -> dict[str, Any]:
    if inputs is None:
        return {}
    return {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)


def _with_mask(keywords: dict[str, Any], mask: Tensor | None, hidden: Tensor) -> dict[str, Any]:
    if mask is None or mask.shape != hidden.shape[:2] or keywords.get("attention_mask", mask) is not None:
        return keywords
    # Transformers leaves out the mask of samples without padding, or of one position. Stages pass on the
    # same structure for all.
    idle = hidden.shape[1] == 1 or bool(mask.all())
    return {**keywords, "attention_mask": mask} if idle else keywords


def _same(first: Any, second: Any) -> bool:
    leaves, spec = pytree.tree_flatten(first)
    second_leaves, second_spec = pytree.tree_flatten(second)
    return spec == second_spec and all(
        a is b or (not isinstance(a, Tensor) and type(a) is type(b) and a == b)
        for a, b in zip(leaves, second_leaves, strict=True)
    )
