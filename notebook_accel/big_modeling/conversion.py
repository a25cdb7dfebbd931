"""Checkpoints with the names of the hub: converts them to what a model of Transformers has, as its `from_pretrained`.

Transformers says which weights have another name in a file, and which are made of others: Mixtral's files have each
expert by itself, its models have one tensor of all. A weight is converted when it is read, so that only what it is made
of is in memory beside it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpointing import models, shards
from ..checkpointing.folder import PathLike
from ..checkpointing.models import Source
from ..errors import CheckpointError

Place = tuple[Source, str]
"""A file, and the name of a weight in it."""


def open_sources(model: nn.Module, checkpoint: PathLike) -> list[Source]:
    """Open the files of a checkpoint; where its names are not those of a model of Transformers, convert them.

    Args:
        model: that gets the weights.
        checkpoint: a file, an index, or a folder with one of these.

    Raises:
        CheckpointError: a file is missing or damaged, or its weights cannot be converted.
    """
    sources = [models.open_source(path) for path in shards.find_files(checkpoint)]
    library = _find_library(model)
    if library is None:
        return sources
    state = models.plain_state(model)
    if _fit(sources, state):
        return sources
    find_transforms, loading = library
    return [_convert(model, state, sources, find_transforms(model), loading)]


def _find_library(model: nn.Module) -> tuple[Callable[[nn.Module], Sequence[Any]], Any] | None:
    """Return what Transformers converts the names of this model with: what finds them, and the module that has them.

    None for models of others, and for Transformers 4, where most models have the names of the files.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
        return mapping.get_model_conversion_mapping, loading
    except (ImportError, AttributeError):
        return None


def _fit(sources: Sequence[Source], state: Mapping[str, Any]) -> bool:
    """Return True if the model has all names of the files, with their shapes."""
    renamed = models.strip_prefixes({name for source in sources for name in source.shapes}, state)
    return all(
        renamed(name) in state and tuple(getattr(state[renamed(name)], "shape", ())) == shape
        for source in sources
        for name, shape in source.shapes.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Recipe:
    """How weights of the model are made of weights in files.

    Attributes:
        model: of Transformers.
        converter: what makes them, a `WeightConverter` of Transformers.
        name: of the first weight, as the converter knows it.
        inputs: weights in files: the pattern of the converter that each matched, and where it is.
    """

    model: nn.Module
    converter: Any
    name: str
    inputs: list[tuple[str, Place]]

    def make(self, read: Callable[[Place], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights of the model by name.

        Args:
            read: returns a weight in a file.
        """
        converter: Any = copy.deepcopy(self.converter)  # it forgets what it converted
        for pattern, place in self.inputs:
            converter.add_tensor(self.name, place[1], pattern, functools.partial(read, place))
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def find_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights of the model by name, without reading anything.

        Raises:
            CheckpointError: the weights in the files do not go together.
        """
        try:
            made = self.make(lambda place: torch.empty(place[0].shapes[place[1]], device="meta"))
        except Exception as error:  # whatever an operation of Transformers raises
            source, key = self.inputs[0][1]
            raise CheckpointError(
                f"{source.path}: Transformers cannot make {self.name!r} of {key!r} and {len(self.inputs) - 1} "
                f"more: {error}"
            ) from error
        return {name: tuple(value.shape) for name, value in made.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted(Source):
    """The weights of all files of a checkpoint, by the names of the model; `path` is their folder if there are several.

    Attributes:
        places: where those are that are in a file as they are.
        recipes: how the others are made.
        transforms: Transformers' renamings and converters that were used.
    """

    places: dict[str, Place]
    recipes: dict[str, _Recipe]
    transforms: Sequence[Any] = ()

    def read(self) -> dict[str, Any]:
        """Return all entries, on the CPU."""
        made: dict[str, Any] = {}
        for recipe in set(self.recipes.values()):
            made |= recipe.make(_read_place)
        return {
            name: made[name] if name in made else self.read_entry(name)
            for name in (*self.shapes, *self.others)
        }

    def read_entry(self, name: str) -> Any:
        """Return one entry, on the CPU; it may be no tensor."""
        if name in self.recipes:
            return self.recipes[name].make(_read_place)[name]
        return _read_place(self.places[name])

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of these names into tensors of the same shapes, one recipe after the other."""
        direct: dict[int, tuple[Source, dict[str, torch.Tensor]]] = {}
        wanted: dict[_Recipe, list[str]] = {}
        for name, target in targets.items():
            if name in self.recipes:
                wanted.setdefault(self.recipes[name], []).append(name)
                continue
            source, key = self.places[name]
            direct.setdefault(id(source), (source, {}))[1][key] = target
        for source, parts in direct.values():
            source.read_into(parts)
        for recipe, names in wanted.items():
            made = recipe.make(_read_place)
            for name in names:
                models.copy_into(targets[name], made[name])
            del made  # before the next ones are read

    def read_together(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield these entries; what one recipe makes is made once, and comes one after the other."""
        by_recipe: dict[_Recipe | None, list[str]] = {}
        for name in names:
            by_recipe.setdefault(self.recipes.get(name), []).append(name)
        for recipe, together in by_recipe.items():
            made = {} if recipe is None else recipe.make(_read_place)
            for name in together:
                yield name, self.read_entry(name) if recipe is None else made.pop(name)

    def verify(self, names: Collection[str]) -> None:
        """Raise CheckpointError where values that these are made of are not those that were written."""
        for name in names:
            recipe = self.recipes.get(name)
            places = [self.places[name]] if recipe is None else [place for _, place in recipe.inputs]
            for source, key in places:
                source.verify([key])

    def locate(self, name: str) -> tuple[Path, str] | None:
        """Return where the values are in a safetensors file as they are; None if there is no such place."""
        if name in self.recipes:
            return None
        source, key = self.places[name]
        return source.locate(key)


def _read_place(place: Place) -> Any:
    source, key = place
    return source.read_entry(key)


def _convert(
    model: nn.Module,
    state: Mapping[str, Any],
    sources: Sequence[Source],
    transforms: Sequence[Any],
    loading: Any,
) -> Converted:
    """Return the weights of all files by the names of the model.

    Args:
        model: of Transformers.
        state: its state dict.
        sources: the files.
        transforms: Transformers' renamings and converters for this model, in their order.
        loading: the module of Transformers that has them.
    """
    stored = {name: (source, name) for source in sources for name in (*source.shapes, *source.others)}
    copied = {
        gone: stored[kept] for source in sources for gone, kept in source.twins.items() if kept in stored
    }
    strip = models.strip_prefixes(set(stored), state)
    rename = _make_renaming(model, state, transforms, loading)
    places: dict[str, Place] = {}
    twins: dict[str, str] = {}
    inputs: dict[str, tuple[Any, list[tuple[str, Place]]]] = {}
    for key in sorted({**stored, **copied}, key=loading.dot_natural_key):  # experts by their numbers
        place = stored[key] if key in stored else copied[key]
        name, pattern, converter = rename(strip(key))
        if converter is not None:
            inputs.setdefault(name, (converter, []))[1].append((pattern, place))
        elif key in stored:
            places.setdefault(name, place)  # of two, Transformers takes the first too
        else:
            twins[name] = rename(strip(place[1]))[0]
    recipes: dict[str, _Recipe] = {}
    shapes = {name: source.shapes[key] for name, (source, key) in places.items() if key in source.shapes}
    for name, (converter, parts) in inputs.items():
        recipe = _Recipe(model=model, converter=converter, name=name, inputs=parts)
        for made, shape in recipe.find_shapes().items():
            recipes[made], shapes[made] = recipe, shape
    return Converted(
        path=sources[0].path if len(sources) == 1 else sources[0].path.parent,
        shapes=shapes,
        twins=twins,
        others=tuple(name for name in places if name not in shapes),
        places=places,
        recipes=recipes,
        transforms=[
            transform
            for transform in transforms
            if not hasattr(transform, "was_used") or transform.was_used()  # Transformers 5.0 keeps all
        ],
    )


def note_conversion(model: nn.Module, sources: Sequence[Source]) -> None:
    """Note for `save_pretrained` how the names of the files became those of the model, as `from_pretrained` does.

    Without a note it would write the names of the hub, also where the files have those of the model.

    Args:
        model: that has been loaded.
        sources: the files; none where another rank has read them.
    """
    if sources and _find_library(model) is not None:
        transforms = [
            step for source in sources if isinstance(source, Converted) for step in source.transforms
        ]
        model._weight_conversions = transforms  # type: ignore[assignment]


def _make_renaming(
    model: Any, state: Mapping[str, Any], transforms: Sequence[Any], loading: Any
) -> Callable[[str], tuple[str, str, Any]]:
    """Return a function that says what becomes of a name in a file.

    It returns the name in the model; where a converter makes the weight, the pattern of it that the name matched, and
    the converter, else None. A name that the model does not have in any form stays as it is.
    """
    converters = [entry for entry in transforms if isinstance(entry, loading.WeightConverter)]
    renamings = [entry for entry in transforms if isinstance(entry, loading.WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def rename(key: str) -> tuple[str, str, Any]:
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state:
            name, pattern = loading.rename_source_key(key, [], [], model.base_model_prefix, state)
        return (name, pattern or "", by_pattern.get(pattern)) if name in state else (key, "", None)

    return rename
