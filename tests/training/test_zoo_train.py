"""Training of corpus models: what is checked in learned something, and a seed gives one model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from routepilot.env import zoo

pytestmark = pytest.mark.skipif(
    not all(find_spec(name) for name in ("torch", "onnxscript", "sklearn")),
    reason="the extra zoo is not installed",
)

TRAINED_HERE = [entry.name for entry in zoo.ENTRIES if entry.origin == "trained here"]


@pytest.mark.parametrize("name", TRAINED_HERE)
def test_every_checked_in_model_learned(name: str) -> None:
    from routepilot.training.zoo_train import learned

    assert learned(zoo.quality()[name]), zoo.quality()[name]


@pytest.mark.parametrize("name", ["clicks_dcn", "graph_net", "points_pointnet"])
def test_the_checked_in_weights_have_the_quality_that_is_claimed(name: str) -> None:
    from routepilot.env.zoo_export import DEFINITIONS, load_weights, weights_file
    from routepilot.training.zoo_train import quality

    model = DEFINITIONS[name]()
    load_weights(model, weights_file(name))
    found, claimed = quality(name, model), zoo.quality()[name]
    assert found["measure"] == claimed["measure"]
    assert abs(float(str(found["reached"])) - float(str(claimed["reached"]))) < 0.02


def test_a_seed_gives_one_model_and_steps_lower_the_loss(tmp_path: Path) -> None:
    import torch

    from routepilot.training.zoo_train import TASKS, fit

    first, second = fit("graph_net", steps=30), fit("graph_net", steps=30)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    task = TASKS["graph_net"]
    batch = task.draw(np.random.default_rng(0), 16, "test")
    with torch.no_grad():
        assert task.loss(first, batch) < task.loss(fit("graph_net", steps=0), batch)


def test_a_model_that_is_not_trained_here_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from routepilot.training.zoo_train import main

    assert main(["resnett", "--out", str(tmp_path)]) == 2
    assert "resnett" in capsys.readouterr().err


def test_weights_come_back_as_half_precision_and_quality_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from routepilot.env.zoo_export import DEFINITIONS, load_weights
    from routepilot.training import zoo_train

    short = replace(zoo_train.TASKS["graph_net"], steps=10)
    monkeypatch.setattr(zoo_train, "TASKS", {**zoo_train.TASKS, "graph_net": short})
    facts = zoo_train.train_and_save("graph_net", tmp_path)
    model = DEFINITIONS["graph_net"]()
    load_weights(model, tmp_path / "graph_net.safetensors")
    for weight in model.parameters():
        assert (weight.half().float() == weight).all()
    assert zoo_train.quality("graph_net", model)["reached"] == facts["reached"]
    written = json.loads((tmp_path / "quality.json").read_text("utf-8"))
    assert written == {"graph_net": facts}
