"""Policies as folders: whole on arrival, or refused; the card says what the policy's own says."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import synthetic

from routepilot.agents.policy import Card, file_hash, load_policy, save_policy, shapes
from routepilot.env.errors import (
    InputError,
    MachineError,
    MissingExtraError,
    PolicyError,
    RoutePilotError,
)
from routepilot.env.likeness import Kernel
from routepilot.env.tables import save_table
from routepilot.training import hub
from routepilot.training.cli import main
from routepilot.training.defaults import find_policy, pulled_policies

FILES = {"README.md", "manifest.json", "policy.json", "policy.safetensors", "made.parquet"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A policy as `train` leaves it."""
    folder = tmp_path / "trained"
    folder.mkdir()
    save_table(synthetic.table(), folder / "made.parquet")
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(0, 0.4, shape).astype(np.float32) for n, shape in shapes().items()}
    card = Card(
        name="mine",
        table="made.parquet",
        table_sha256=file_hash(folder / "made.parquet"),
        models=("model0", "model1"),
        held_out=("family3",),
        gate={"metric": "rel_l2", "limit": 1e-2},
        kernel=Kernel().__dict__,
        seed=7,
        steps=1234,
        scores={"on": "unseen models: all of them", "gain_share": {"1": 0.5, "4": 0.875}},
        versions={"routepilot": "0.1.0"},
    )
    return save_policy(folder, weights, card)


def test_what_was_pushed_is_pulled_and_used(made: Path, tmp_path: Path) -> None:
    place = tmp_path / "shared" / "folder"
    assert hub.push(str(made), str(place)) == str(place)
    assert {path.name for path in place.iterdir()} == FILES
    shutil.rmtree(made.parent)  # the folder is all there is
    assert find_policy(str(place)) == place / "policy.safetensors"
    pulled = hub.pull(str(place), name="ours")
    assert find_policy("ours") == pulled / "policy.safetensors" and pulled_policies() == ["ours"]
    loaded = load_policy(find_policy("ours"))
    assert loaded.card.name == "mine" and loaded.card.seed == 7
    assert "family3" not in loaded.replay.table.families
    # Again over itself, and to a place of one's own.
    assert hub.pull(str(place), name="ours") == pulled
    assert hub.pull(str(place), out=tmp_path / "own") == tmp_path / "own"
    found = hub.describe("ours")
    assert found["origin"] == "pulled" and found["steps"] == 1234
    assert found["measured_on"]["backend"] == synthetic.table().target.backend
    assert [r["name"] for r in hub.listing() if r["origin"] == "pulled"] == ["ours"]


def test_the_card_is_what_a_hub_reads(made: Path, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    hub.push(str(made), str(tmp_path / "out"))
    text = (tmp_path / "out" / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    data = yaml.safe_load(head)
    assert data["license"] == "apache-2.0" and data["library_name"] == "routepilot"
    (entry,) = data["model-index"]
    values = [m["value"] for m in entry["results"][0]["metrics"]]
    assert entry["name"] == "mine" and values == [0.5, 0.875]
    for words in ("unseen models: all of them", "| 4 | 88 % |", "family3", "1,234, 7"):
        assert words in body
    client = pytest.importorskip("huggingface_hub")
    card = client.ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "apache-2.0"
    assert [r.metric_value for r in card.data.eval_results] == [0.5, 0.875]


def change_manifest(place: Path, **change: Any) -> None:
    data = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**data, **change}))


def spoil(place: Path, how: str) -> None:
    """Do to a folder what a pull must refuse."""
    if how in ("policy.safetensors", "policy.json", "made.parquet", "README.md"):
        data = bytearray((place / how).read_bytes())
        data[len(data) // 2] ^= 1
        (place / how).write_bytes(data)
        return
    files = json.loads((place / "manifest.json").read_text())["files"]
    if how == "gone":
        (place / "made.parquet").unlink()
    elif how == "link":
        (place / "README.md").rename(place.parent / "outside")
        (place / "README.md").symlink_to(place.parent / "outside")
    elif how == "newer":
        change_manifest(place, format=2, routepilot="9.0")
    elif how == "no manifest":
        (place / "manifest.json").unlink()
    elif how == "no files":
        change_manifest(place, files=3)
    elif how == "no table":
        change_manifest(place, files={n: d for n, d in files.items() if n != "made.parquet"})
    elif how == "pickle":
        (place / "weights.pkl").write_bytes(b"cos\nsystem\n")
        change_manifest(place, files={**files, "weights.pkl": file_hash(place / "weights.pkl")})
    elif how == "outside":
        (place.parent / "x.parquet").write_bytes(b"")
        digest = file_hash(place.parent / "x.parquet")
        change_manifest(place, files={**files, "../x.parquet": digest})
    elif how == "features":
        card = json.loads((place / "policy.json").read_text())
        card["row_features"] = card["row_features"][1:]
        (place / "policy.json").write_text(json.dumps(card))
        change_manifest(place, files={**files, "policy.json": file_hash(place / "policy.json")})


HARM = "policy.safetensors,policy.json,made.parquet,README.md,gone,link,newer,no manifest,no files"


@pytest.mark.parametrize(
    "how", [*HARM.split(","), "no table", "pickle", "outside", "features"], ids=str
)
def test_what_is_not_whole_is_refused_and_not_kept(made: Path, tmp_path: Path, how: str) -> None:
    place = tmp_path / "place"
    hub.push(str(made), str(place))
    spoil(place, how)
    with pytest.raises(PolicyError) as refused:
        hub.pull(str(place), name="ours")
    assert "\n" not in str(refused.value)
    assert pulled_policies() == []
    left = tmp_path / "data" / "routepilot" / "policies"
    assert not left.exists() or not list(left.iterdir())


def test_a_stray_file_stays_where_it_is(made: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    hub.push(str(made), str(place))
    (place / "evil.py").write_text("raise SystemExit")
    assert {path.name for path in hub.pull(str(place)).iterdir()} == FILES


def test_names_and_places_that_cannot_be_are_refused(made: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    hub.push(str(made), str(place))
    for name in ("cpu", "a/b", ".."):
        with pytest.raises(InputError, match="name"):
            hub.pull(str(place), name=name)
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("years of work")
    for call in (lambda: hub.push(str(made), str(full)), lambda: hub.pull(str(place), out=full)):
        with pytest.raises(InputError, match="something else"):
            call()
    assert (full / "thesis.tex").read_text() == "years of work"
    with pytest.raises(InputError, match="is a file"):
        hub.push(str(made), str(full / "thesis.tex"))
    for wrong in ("hf://", "hf://only", "hf://a/b/c", "hf://a/b@"):
        with pytest.raises(InputError, match="hf://user/repo"):
            hub.pull(wrong)


class FakeHub:
    """As much of `huggingface_hub` as is called: repositories in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.HfApi = lambda: SimpleNamespace(create_repo=self.create, upload_folder=self.upload)

    def create(self, repository: str, **kwargs: Any) -> None:
        self.calls.append(("create", {"repo": repository, **kwargs}))

    def upload(self, *, repo_id: str, folder_path: str, **kwargs: Any) -> None:
        self.calls.append(("upload", kwargs))
        shutil.copytree(folder_path, self.folder / repo_id, dirs_exist_ok=True)

    def snapshot_download(self, repo_id: str, *, local_dir: str, **kwargs: Any) -> str:
        self.calls.append(("download", kwargs))
        if not (self.folder / repo_id).is_dir():
            raise OSError("404 Client Error\nRepository Not Found")
        shutil.copytree(self.folder / repo_id, local_dir, dirs_exist_ok=True)
        return local_dir


def test_a_hub_is_served_through_its_client(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(hub, "_import_hub", lambda: fake)
    assert hub.push(str(made), "hf://me/mine", private=True) == "hf://me/mine"
    assert fake.calls[0] == ("create", {"repo": "me/mine", "private": True, "exist_ok": True})
    assert {path.name for path in (tmp_path / "hub" / "me" / "mine").iterdir()} == FILES
    assert hub.pull("hf://me/mine@v1").name == "mine"
    assert fake.calls[-1][1]["revision"] == "v1"
    assert "*.safetensors" in fake.calls[-1][1]["allow_patterns"]
    assert load_policy(find_policy("mine")).card.steps == 1234
    with pytest.raises(MachineError, match="404 Client Error Repository Not Found"):
        hub.pull("hf://me/none")


def test_the_client_takes_what_it_is_given() -> None:
    """The real client has the functions and arguments that are used; nothing is asked of a hub."""
    import inspect

    client = pytest.importorskip("huggingface_hub")
    wanted = {
        client.snapshot_download: {"repo_id", "revision", "local_dir", "allow_patterns"},
        client.HfApi.create_repo: {"repo_id", "private", "exist_ok"},
        client.HfApi.upload_folder: {"repo_id", "folder_path", "revision", "commit_message"},
    }
    for function, arguments in wanted.items():
        assert arguments <= set(inspect.signature(function).parameters)


def test_without_the_client_a_line_says_what_to_install(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"routepilot\[hub\]"):
        hub.push(str(made), "hf://me/mine")


def test_verbs(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["routepilot", "policy", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    place = str(tmp_path / "place")
    code, text, _ = run("push", str(made), place, "--json")
    assert code == 0 and json.loads(text)["place"] == place
    code, text, _ = run("pull", place, "--name", "ours", "--json")
    assert code == 0 and json.loads(text)["policy"] == "ours"
    code, text, _ = run("list", "--json")
    names = {row["name"]: row for row in json.loads(text)}
    assert code == 0 and {"cpu", "ours"} <= set(names) and names["ours"]["note"] == ""
    code, text, _ = run("show", "ours", "--json")
    assert code == 0 and json.loads(text)["weights_sha256"] == file_hash(made)
    for words in (("list",), ("show", "ours")):
        code, text, _ = run(*words)
        assert code == 0 and "made.parquet" in text.replace("\n", "")
    code, _, err = run("show", "nobody")
    assert code == 2 and "pulled: ours" in " ".join(err.split())
    assert issubclass(PolicyError, RoutePilotError)
