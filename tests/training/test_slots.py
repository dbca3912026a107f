"""Slots of this machine: a core or a GPU each, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from routepilot.env.backends import load_backend
from routepilot.env.errors import InputError
from routepilot.env.models import Model
from routepilot.training.collect import CorpusModel, Repeats, collect, plan_routes
from routepilot.training.collect import table_from_store as table_of
from routepilot.training.session import SessionConfig
from routepilot.training.slots import Slot, local_slots, measuring_slots, read_cores

CORES = sorted(os.sched_getaffinity(0))


def test_workers_on_processors_have_a_core_each_or_none() -> None:
    assert local_slots("cpu", {"threads": "1"}, 1) == (Slot(cpu=CORES[0]),)
    assert local_slots("cpu", {"threads": str(len(CORES))}, 1) == (Slot(),) or len(CORES) == 1
    assert local_slots("inductor", {"device": "cpu"}, 1) == (Slot(cpu=CORES[0]),)
    with pytest.raises(InputError, match="lower --workers"):
        local_slots("cpu", {"threads": "1"}, len(CORES) + 1)
    with pytest.raises(InputError, match="give 1 or more"):
        local_slots("cpu", {}, 0)
    last = CORES[-1]
    assert local_slots("cpu", {"threads": "1"}, 1, cores=[last]) == (Slot(cpu=last),)
    with pytest.raises(InputError, match="not all of this machine"):
        local_slots("cpu", {}, 1, cores=[last + 1000])
    wrongs = (("cpu", [last, last]), ("cuda", [last, CORES[0]])) if len(CORES) > 1 else ()
    for backend, wrong in wrongs:
        with pytest.raises(InputError, match="one core for each worker"):
            local_slots(backend, {}, 2, cores=wrong)
    assert read_cores("2, 3") == [2, 3]
    with pytest.raises(InputError, match="--cores"):
        read_cores("2;3")


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize(("backend", "name"), [("cuda", "device"), ("inductor", "index")])
def test_workers_on_gpus_take_them_in_turn(backend: str, name: str) -> None:
    slots = local_slots(backend, {"threads": "1"}, 2, gpus=2)
    assert [slot.options for slot in slots] == [{name: "0"}, {name: "1"}]
    assert all(slot.cpu is None for slot in slots)
    # Two workers of one GPU: one measures while the other builds, by the device's lock.
    shared = local_slots(backend, {"threads": "1"}, 2, gpus=1)
    assert [slot.options for slot in shared] == [{name: "0"}, {name: "0"}]
    fixed = local_slots(backend, {"threads": "1", name: "3"}, 2, gpus=2)
    assert all(not slot.options for slot in fixed)
    fitted = slots[1].fit(SessionConfig(backend, {"graphs": "off"}))
    assert fitted.options == {"graphs": "off", name: "1"} and fitted.cpu is None


def test_a_slot_of_a_cluster_needs_a_cluster() -> None:
    config = SessionConfig()
    with pytest.raises(InputError, match="--ray"):
        with measuring_slots(config, None, needs="CPU=1"):
            pass
    with measuring_slots(config, None) as pool:
        assert len(pool.slots) == 1 and pool.facts() == {}
        assert pool.compiler(config)[1].key == load_backend("cpu", {}).target().key


def test_engines_of_several_threads_are_collected_too(tiny: Model, tmp_path: Path) -> None:
    options = {"threads": "2"}
    if len(CORES) < 2:
        pytest.skip("needs two cores")
    backend = load_backend("cpu", options)
    plan = plan_routes(backend.catalog(), 1)[:1]
    store = tmp_path / "records.sqlite"
    collect(
        [CorpusModel(tiny, "toys", False)],
        store,
        SessionConfig(options=options),
        plan,
        tmp_path / "work",
        repeats=Repeats(controls=0),
        slots=local_slots("cpu", options, 1),
    )
    table = table_of(store, backend.target().key, [tiny.fingerprint], {})
    assert len(table.outcomes[tiny.fingerprint]) == 2
