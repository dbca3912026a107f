"""Recipes: a YAML file that says on what and how a policy is trained, in `checkpoints/`.

Owns the file's keys, what a reader refuses, and how options override them. Keys are the fields of
`Recipe` and of `TrainConfig`, side by side, after the manner of rl-baselines3-zoo. Trains nothing.
"""

from __future__ import annotations

import difflib
import math
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from routepilot.env.accuracy import Gate
from routepilot.env.errors import InputError, MissingExtraError
from routepilot.env.records import RouteTable
from routepilot.env.zoo_entries import SPLITS, splits
from routepilot.training.defaults import checkpoints_folder
from routepilot.training.train_config import TrainConfig

#: Stands for the validation families of the corpus' split among `validation`.
SPLIT = "split"

#: Settings of which 0 means something; every other number must be more.
MAY_BE_ZERO = frozenset(
    {
        "seed",
        "steps",
        "entropy",
        "teacher_episodes",
        "teacher_epochs",
        "prices",
        "blind",
        "patience",
    }
    | {"shared", "alike", "own", "strong", "weak", "probes", "beside", "learning_rate", "trace"}
)

#: Settings that are shares: 1 at most.
SHARES = frozenset({"share", "knobs", "blind", "gamma", "trace"})


@dataclass(frozen=True)
class Recipe:
    """On what a policy is trained.

    Attributes:
        name: Name of the policy.
        tables: Route tables: files, or released names.
        hold_out: Families left out of everything.
        learn_from: Splits of the corpus to learn from; all families when empty.
        validation: Families that choose the weights and stop the training; `split` stands for the
            corpus' validation families.
        metric: Metric of the accuracy gate.
        limit: Its limit, at which the policy is scored.
        settings: How it is trained.
    """

    name: str = "policy"
    tables: tuple[str, ...] = ("cpu",)
    hold_out: tuple[str, ...] = ()
    learn_from: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    metric: str = "rel_l2"
    limit: float = 1e-2
    settings: TrainConfig = TrainConfig()

    @property
    def gate(self) -> Gate:
        """The accuracy gate."""
        return Gate(metric=self.metric, limit=self.limit)


def find_recipe(name: str) -> Path:
    """The file of a recipe given by path or released name.

    Raises:
        InputError: There is no such file or name.
    """
    folder = checkpoints_folder()
    for path in (Path(name), folder / f"{name}.yaml"):
        if os.path.isfile(path):
            return path
    released = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise InputError(f"no recipe {name!r}; released: {released}; or give the path of a .yaml file")


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings of a recipe file, as given.

    Raises:
        InputError: It cannot be read, or is no mapping.
        MissingExtraError: PyYAML is not installed.
    """
    yaml = _yaml()
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"recipe {str(path)!r} cannot be read ({reason}); give YAML") from None
    if not isinstance(found, dict):
        raise InputError(
            f"recipe {str(path)!r} holds no settings; give lines of the form key: value"
        )
    return {str(key): value for key, value in found.items()}


def read_setting(text: str) -> tuple[str, Any]:
    """A setting written `key=value`, the value as YAML.

    Raises:
        InputError: It has another form.
    """
    yaml = _yaml()
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"setting {text!r} has no value; give it as key=value")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"setting {text!r} has a value that is no YAML; give key=value") from None


def make_recipe(given: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from settings; what is not given has its default.

    Args:
        given: Settings by key.
        where: What they came from, for messages.

    Raises:
        InputError: A key that is not known, or a value of the wrong type or out of range.
    """
    own = [f.name for f in fields(Recipe) if f.name != "settings"]
    known = [*own, *(f.name for f in fields(TrainConfig))]
    for key in given:
        if key not in known:
            raise InputError(f"{where} has no setting {key!r}; {_nearest(key, known)}")
    hints = {**get_type_hints(TrainConfig), **get_type_hints(Recipe)}
    read = {key: _read(value, hints[key], key, where) for key, value in given.items()}
    mine = {key: value for key, value in read.items() if key in own}
    settings = TrainConfig(**{key: value for key, value in read.items() if key not in own})
    recipe = Recipe(**mine, settings=settings)
    _check(recipe, where)
    return recipe


def plan_families(
    recipe: Recipe, tables: Sequence[RouteTable]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Families that a recipe holds out of everything, and those that validate.

    Raises:
        InputError: A family that no table has, an unknown split, or a family that is both.
    """
    families = tuple(dict.fromkeys(f for table in tables for f in table.families))
    validation = [f for f in recipe.validation if f != SPLIT]
    for family in (*recipe.hold_out, *validation):
        if family not in families:
            raise InputError(
                f"family {family!r} is not in the table; it has {', '.join(sorted(families))}"
            )
    held_out = (*recipe.hold_out, *later_families(families, recipe.learn_from))
    both = sorted(set(held_out) & set(validation))
    if both:
        raise InputError(
            f"family {both[0]!r} is held out and validates, and it can do one; name it once"
        )
    if SPLIT in recipe.validation:
        of_split = [f for f in families if splits().get(f) == "validation" and f not in held_out]
        if not of_split:
            raise InputError(
                "no family of the validation split is in the table and not held out; name others"
            )
        validation += of_split
    return tuple(dict.fromkeys(held_out)), tuple(dict.fromkeys(validation))


def later_families(families: Sequence[str], learn_from: Sequence[str]) -> tuple[str, ...]:
    """Families of the corpus' splits that are not named.

    Raises:
        InputError: An unknown split.
    """
    unknown = sorted(set(learn_from) - set(SPLITS))
    if unknown:
        raise InputError(f"split {unknown[0]!r} is not known; choose from {', '.join(SPLITS)}")
    if not learn_from:
        return ()
    return tuple(f for f in families if splits().get(f, learn_from[0]) not in learn_from)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("recipes need PyYAML; pip install 'routepilot[train]'") from None
    return yaml


def _read(value: Any, hint: Any, key: str, where: str) -> Any:
    """A value as its type wants it."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _read(value, get_args(hint)[0], key, where)
    if origin is tuple:
        return _read_tuple(value, get_args(hint), key, where)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        if not isinstance(value, Mapping):
            raise _wrong(value, f"settings of {', '.join(hints)}", key, where)
        for name in map(str, value):  # YAML has keys that are no words
            if name not in hints:
                raise InputError(f"{where} has no setting {key}.{name}; {_nearest(name, hints)}")
        return hint(**{n: _read(v, hints[n], f"{key}.{n}", where) for n, v in value.items()})
    if hint is float:
        return _read_float(value, key, where)
    # In Python true is a number, and in YAML it is not.
    if isinstance(value, bool) is not (hint is bool) or not isinstance(value, hint):
        what = {int: "a whole number", bool: "true or false", str: "a text"}[hint]
        raise _wrong(value, what, key, where)
    return value


def _read_float(value: Any, key: str, where: str) -> float:
    # YAML 1.1 reads 1e-4, which has no point, as a text.
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise _wrong(value, "a number", key, where)
    return found


def _read_tuple(value: Any, parts: tuple[Any, ...], key: str, where: str) -> tuple[Any, ...]:
    if isinstance(value, str) and parts[0] is str:
        value = [value]
    long = len(parts) == 2 and parts[1] is Ellipsis
    if not isinstance(value, list) or not (long or len(value) == len(parts)):
        raise _wrong(value, "a list" if long else f"a list of {len(parts)}", key, where)
    return tuple(_read(one, parts[0], key, where) for one in value)


def _wrong(value: Any, wanted: str, key: str, where: str) -> InputError:
    return InputError(f"{where} gives {key} as {value!r}; give {wanted}")


def _nearest(key: str, known: Any) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(known)}"


def _check(recipe: Recipe, where: str) -> None:
    """Refuse values of the right type that mean nothing."""
    config = recipe.settings
    for key, value in {**asdict(config), "limit": recipe.limit, **asdict(config.kernel)}.items():
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            if number < 0 or (number == 0 and key not in MAY_BE_ZERO):
                more = "0 or more" if key in MAY_BE_ZERO else "more than 0"
                raise InputError(f"{where} gives {key} as {number!r}; give {more}")
            if key in SHARES and number > 1:
                raise InputError(f"{where} gives {key} as {number!r}; give 1 at most")
    for key, (low, high) in {"budgets": config.budgets, "prices": config.prices}.items():
        if low > high:
            raise InputError(f"{where} gives {key} as {[low, high]}; give the smaller first")
    for key, given in {"tables": recipe.tables, "limits": config.limits}.items():
        if not given:
            raise InputError(f"{where} gives no {key}; give one at least")
    if min(config.batch, config.environments * config.rollout) < 2:
        raise InputError(f"{where} gives batches of one step; give batch and rollout 2 at least")
