"""Finds a checkpoint's arrays for a pipeline that freezes other parameters (`jpipe.freeze`): gradual unfreezing.

A layer's own tree, or the model's if it is one module, is the same, frozen or not, so its two descriptions pair the
parameters. The optimiser's arrays for a parameter have the parameter's name, so that names pair them too. Three
parameters, where frozen ones have no moments:

    checkpoint                    pipeline
    params/a   mu/a      ->       params/a   mu/a      as saved
    frozen/b             ->       params/b   mu/b      the value as saved, mu/b of a new state (`Origin.fresh`)
    params/c   mu/c      ->       frozen/c             the value as saved
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax

from jpipe.checkpoints.containers import Json, name_of
from jpipe.checkpoints.contents import LAYERS, OPTIMIZER, Contents, Path, named_trees, parameter_of

PARAMS = "params"


@dataclass(frozen=True)
class Origin:
    """Says which array of a checkpoint each array of a state is.

    Attributes:
      names: path in the state -> path in the checkpoint, of each parameter that is frozen in one of the two alone.
      fresh: arrays of the optimiser for parameters that were frozen: they are those of a new state.
      dropped: arrays of the checkpoint's optimiser for parameters that are frozen now.
    """

    names: dict[Path, Path]
    fresh: frozenset[Path]
    dropped: frozenset[Path]

    def renamed(self, saved: Json, wanted: Json) -> Json:
        """The checkpoint's description as if it had frozen the same parameters as the pipeline.

        Args:
          saved: the checkpoint's description.
          wanted: the pipeline's description.
        """
        state_names = {saved_name: name for name, saved_name in self.names.items()}
        arrays = [(tuple(path), *rest) for path, *rest in saved["arrays"]]
        kept = [[list(state_names.get(path, path)), *rest] for path, *rest in arrays if path not in self.dropped]
        return saved | {"arrays": kept + [array for array in wanted["arrays"] if tuple(array[0]) in self.fresh]}


def origin_of(saved: Json, wanted: Json, contents: Contents) -> Origin:
    """Finds where a state's arrays come from.

    Args:
      saved: the checkpoint's description.
      wanted: the pipeline's description.
      contents: the names and places of the arrays of the pipeline's state.

    Raises:
      ValueError: an array of the optimiser can't be told apart by parameters; it is named.
    """
    names = _renamed_parameters(saved, wanted)
    changed = {parameter_of(path)[0] for path in names}
    collections = {parameter_of(path)[1] for pair in names.items() for path in pair}
    parameters = _parameters(contents, collections)
    there, here = ({tuple(path): shape for path, _, shape in description["arrays"]} for description in (saved, wanted))
    fresh, dropped = set(), set()
    for path, shape in (there | here).items():
        layer = next((name for name in ("", *path) if name in changed), None)
        if path[0] != OPTIMIZER or layer is None:
            continue
        # An array of the optimiser for a parameter has its name at the end of its path; the longest such name counts. A
        # parameter that is all of its layer has an empty name: arrays of its shape belong to it.
        named = {keys: p for keys, p in parameters[layer].items() if keys or here[p] == shape}
        ends = [keys for keys in named if path[len(path) - len(keys) :] == keys]
        owner = named[max(ends, key=len)] if ends else None
        if owner is None:
            trained = sum(math.prod(here[p]) for p in parameters[layer].values() if parameter_of(p)[1] == PARAMS)
            # An array with a name of its own, such as a count, belongs to no parameter, unless it is as long as all of
            # the layer's parameters together. A whole model's optimiser names all that belongs to parameters.
            is_told = not layer or (not path[-1].isdigit() and (not shape or math.prod(shape) != trained))
        else:
            trains = [parameter_of(p)[1] == PARAMS for p in (owner, names.get(owner, owner))]
            is_told = all(it_trains or path not in has for it_trains, has in zip(trains, (here, there), strict=True))
        if not is_told:
            one = next(p for p in names if parameter_of(p)[0] == layer)
            raise ValueError(
                f"{'/'.join(path)} belongs to no single parameter by its name, while {layer} had other parameters "
                f"frozen in the checkpoint ({'/'.join(one[2:])} is one that changed), so what the optimiser kept can't "
                "be told apart; freeze the same parameters"
            )
        if owner in names:
            (fresh if path in here else dropped).add(path)
    return Origin(names, frozenset(fresh), frozenset(dropped))


def _renamed_parameters(saved: Json, wanted: Json) -> dict[Path, Path]:
    """The parameters that one of the two alone froze: path in the pipeline -> path in the checkpoint."""
    names = {}
    for trees in zip(named_trees(wanted), named_trees(saved), strict=False):  # `first_difference` compares the counts
        if jax.tree.structure(trees[0]) == jax.tree.structure(trees[1]):
            for pair in zip(*map(jax.tree.leaves, trees), strict=True):
                (layer, collection, _), (other, another, _) = (parameter_of(leaf.path) for leaf in pair)
                if layer == other and collection != another:
                    names |= zip(pair[0].paths, pair[1].paths, strict=False)
    return names


def _parameters(contents: Contents, collections: set[str]) -> dict[str, dict[Path, Path]]:
    """The paths of each layer's parameters, by their names in an optimiser's tree, with metadata boxes.

    Args:
      contents: the names and places of the arrays of the pipeline's state.
      collections: the collection of trained parameters and that of frozen ones.
    """
    by_layer = {}
    for record in contents.each_record:
        if contents.cut is not None:
            paths = [path for name in collections for path in record.shapes.get(f"{LAYERS}/{name}", ())]
            by_layer.setdefault("", {}).update((parameter_of(path)[2], path) for path in paths)
            continue
        names = by_layer.setdefault(contents.layer_name(record.users[0]), {})
        for collection in sorted(collections, key=PARAMS.__eq__):  # where names are the same, the trained one counts
            if shapes := record.shapes.get(f"{LAYERS}/{collection}"):
                treedef = contents.state.variables[collection].layout.treedefs[record.record_type]
                numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))
                keys = [tuple(map(name_of, path)) for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
                names |= dict(zip(keys, shapes, strict=True))
    return by_layer
