"""Recipes: the released ones are the shipped policies', and what is wrong is told in one line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import synthetic
from typer.testing import CliRunner

from routepilot.env.errors import InputError
from routepilot.env.records import RouteTable
from routepilot.env.tables import load_table, save_table
from routepilot.training import cli_learning
from routepilot.training.cli import app
from routepilot.training.defaults import checkpoints_folder, find_table
from routepilot.training.recipe import (
    Recipe,
    find_recipe,
    make_recipe,
    plan_families,
    read_recipe,
    read_setting,
)
from routepilot.training.train_config import TrainConfig

assert cli_learning


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_released_recipes_have_what_the_cards_say(name: str) -> None:
    recipe = make_recipe(read_recipe(find_recipe(name)), name)
    card = json.loads((checkpoints_folder() / f"{name}.json").read_text())
    assert recipe.name == card["name"] and recipe.settings.seed == card["seed"]
    assert [find_table(t).name for t in recipe.tables] == [card["table"]]
    assert list(recipe.hold_out) == card["held_out"]
    assert {"metric": recipe.metric, "limit": recipe.limit} == card["gate"]
    assert asdict(recipe.settings.kernel) == card["kernel"]
    rollout = recipe.settings.environments * recipe.settings.rollout
    assert -(-recipe.settings.steps // rollout) * rollout == card["steps"]


def test_the_recipe_for_any_catalog_reads() -> None:
    recipe = make_recipe(read_recipe(find_recipe("any")), "any")
    assert len(recipe.tables) == 2 and recipe.settings.blind > 0 and recipe.settings.knobs < 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learning_rat": 1e-4}, "did you mean 'learning_rate'"),
        ({"seed": "one"}, "give a whole number"),
        ({"seed": True}, "give a whole number"),
        ({"noise": 1}, "give true or false"),
        ({"budgets": [1, 2, 3]}, "give a list of 2"),
        ({"budgets": [8, 2]}, "smaller first"),
        ({"limits": []}, "gives no limits"),
        ({"limits": 0.1}, "give a list"),
        ({"learning_rate": "fast"}, "give a number"),
        ({"learning_rate": float("nan")}, "give a number"),
        ({"steps": -1}, "0 or more"),
        ({"rollout": 0}, "more than 0"),
        ({"share": 1.5}, "1 at most"),
        ({"name": 3}, "give a text"),
        ({"kernel": {"widht": 0.5}}, "did you mean 'width'"),
        ({"kernel": 3}, "give settings of"),
        ({"tables": []}, "gives no tables"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(given: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        make_recipe(given, "recipe 'x.yaml'")
    assert "\n" not in str(refusal.value) and "x.yaml" in str(refusal.value)


def test_values_are_read_as_their_types_want_them() -> None:
    text = {"learning_rate": "1e-4", "gamma": 1, "tables": "cpu", "max_seconds": None}
    recipe = make_recipe(text, "x")
    assert recipe.settings.learning_rate == 1e-4 and isinstance(recipe.settings.gamma, float)
    assert recipe.tables == ("cpu",) and recipe.settings.max_seconds is None
    assert make_recipe({}, "x") == Recipe(settings=TrainConfig())
    assert read_setting("limits=[0.1, 0.2]") == ("limits", [0.1, 0.2])
    with pytest.raises(InputError, match="key=value"):
        read_setting("limits")


@pytest.mark.parametrize("text", ["[1, 2", "- a\n- b", "a: 1\n\tb: 2", "", "!!python/object:os.x"])
def test_files_that_are_no_recipe_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as refusal:
        read_recipe(path)
    assert "\n" not in str(refusal.value)


def in_families(*families: str) -> RouteTable:
    table = synthetic.table(2 * len(families))
    cards = tuple(
        replace(card, family=families[place // 2]) for place, card in enumerate(table.models)
    )
    return replace(table, models=cards)


def test_families_are_planned_by_name_and_by_split() -> None:
    table = in_families("resnet", "bert", "unet", "convnext", "gpt")
    plan = plan_families(Recipe(learn_from=("train", "validation"), validation=("split",)), [table])
    assert plan == (("gpt",), ("convnext",))
    assert plan_families(Recipe(hold_out=("gpt",), validation=("bert",)), [table]) == (
        ("gpt",),
        ("bert",),
    )
    for recipe, words in (
        (Recipe(hold_out=("bert",), validation=("bert",)), "held out and validates"),
        (Recipe(learn_from=("train",), validation=("split",)), "validation split"),
        (Recipe(hold_out=("lenet",)), "not in the table"),
        (Recipe(validation=("lenet",)), "not in the table"),
        (Recipe(learn_from=("tests",)), "not known"),
    ):
        with pytest.raises(InputError, match=words):
            plan_families(recipe, [table])


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["train", *words])
    error = done.exception
    if isinstance(error, InputError):  # as `main` prints it
        return error.exit_code, str(error)
    return done.exit_code, done.output


def test_the_command_reads_a_recipe_and_options_override_it(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    save_table(synthetic.table(), tmp_path / "made.parquet")
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        f"name: small\ntables: ['{tmp_path / 'made.parquet'}']\nhold_out: [family3]\nsteps: 64\n"
        "environments: 2\nrollout: 32\nbatch: 32\nteacher_episodes: 20\nteacher_epochs: 2\n"
        "limits: [1e-2]\nseed: 3\n"
    )
    out = tmp_path / "out"
    code, text = run("--config", str(recipe), "-o", str(out), "--seed", "4", "--set", "epochs=2")
    assert code == 0, text
    card = json.loads((out / "small.json").read_text())
    assert card["seed"] == 4 and card["settings"]["epochs"] == 2 and card["steps"] == 64
    assert card["held_out"] == ["family3"] and load_table(out / "small.parquet").models

    recipe.write_text(recipe.read_text() + "sed: 1\n")
    for words, said in (
        (("--config", str(recipe)), "did you mean 'seed'"),
        (("--config", "nowhere"), "no recipe 'nowhere'"),
        (("--table", "nowhere"), "no route table 'nowhere'"),
        (("--set", "steps=many"), "whole number"),
    ):
        code, text = run(*words, "-o", str(tmp_path / "none"))
        assert code == 2 and said in text and "\n" not in text.strip()
    assert not (tmp_path / "none").exists()


def test_a_setting_inside_a_setting_that_is_no_word_is_refused() -> None:
    """YAML reads `{own: 0.2,0, width: 0.5}` as having a key that is a number."""
    with pytest.raises(InputError, match=r"no setting kernel\.0; it knows shared"):
        make_recipe({"kernel": {"own": 0.2, 0: None}}, "r.yaml")
