"""Whatever reads words or files, each with a sound input of its own: what `test_fuzz.py` injures.

Owns `PLAIN`, readers of words, and `IN_FOLDER`, readers of files that need a folder. Command lines
are in `command_lines.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import synthetic

from routepilot.env.routes import Catalog

#: Reads an input in a folder of its own.
Reader = Callable[[Path, bytes], object]


def text(read: Callable[[str], object]) -> Reader:
    return lambda place, data: read(data.decode(errors="surrogateescape"))


def file(read: Callable[[Path], object], name: str) -> Reader:
    def reader(place: Path, data: bytes) -> object:
        path = place / name
        path.write_bytes(data)
        return read(path)

    return reader


def catalog() -> Catalog:
    from routepilot.env.backends.tensorrt_catalog import read_build_routes, shipped_routes_json

    return Catalog("tensorrt", "x", tuple(read_build_routes(shipped_routes_json())[1][:40]))


def expressions() -> tuple[bytes, Reader]:
    from routepilot.env.routes import parse_expression

    knobs = catalog()
    some, other = knobs.knobs[3], knobs.knobs[5]
    sound = f"{some.name}=[{'|'.join(some.all_values)}] {other.name}={other.default}"

    def read(words: str) -> None:
        found = parse_expression(words, knobs)
        assert found.count_full() > 0
        for settings in itertools.islice(found.fast(knobs), 50):
            knobs.route(settings)

    return sound.encode(), text(read)


def routes() -> tuple[bytes, Reader]:
    knobs = catalog()
    sound = " ".join(f"{k.name}={k.all_values[-1]}" for k in knobs.knobs[:4])
    return sound.encode(), text(lambda words: knobs.parse(words))


def tuning_caches() -> tuple[bytes, Reader]:
    from routepilot.env import trtexec

    header = {
        "tuner_version": "1.0", "accuracy_algorithm": "L0", "searching_algorithm": "fast",
        "accuracy_parameter": {"atol": 1e-5, "rtol": 1e-5, "epsilon": 0.1},
        "default_build_route": "-a=1 -b=on", "tuning_expr": "-a=[1|2]", "files": {"onnx": "m.onnx"},
    }  # fmt: skip
    rows = [
        {"iter": i, "build_route": f"-a={i + 1} -b=on", "crash": False, "error_message": "",
         "accuracy_loss": {"y": 0.0}, "gpu_time": 1.5 + i}
        for i in range(3)
    ]  # fmt: skip
    sound = "\n".join(json.dumps(line) for line in [header, *rows]).encode()

    def read(path: Path) -> object:
        cache = trtexec.read_tuning_cache(path)
        return trtexec.cache_outcomes(cache, trtexec.cache_catalog(cache))

    return sound, file(read, "cache.json")


def knob_lists() -> tuple[bytes, Reader]:
    from routepilot.env.backends.tensorrt_catalog import read_build_routes, shipped_routes_json

    data = json.loads(shipped_routes_json())
    short = {k: (v[:6] if isinstance(v, list) else v) for k, v in data.items()}
    if not any(isinstance(v, list) for v in data.values()):
        short = dict(list(data.items())[:6])
    return json.dumps(short).encode(), text(read_build_routes)


def tables(place: Path) -> tuple[bytes, Reader]:
    from routepilot.env.tables import load_table, save_table

    save_table(synthetic.table(2), place / "sound.parquet")
    return (place / "sound.parquet").read_bytes(), file(load_table, "t.parquet")


def table_texts(place: Path) -> tuple[bytes, Reader]:
    """The description inside a table, which Parquet's own checks do not guard."""
    import pyarrow.parquet as pq

    from routepilot.env.tables import METADATA_KEY, load_table, save_table

    save_table(synthetic.table(2), place / "sound.parquet")
    whole = pq.read_table(place / "sound.parquet")

    def read(path: Path) -> object:
        changed = whole.replace_schema_metadata({METADATA_KEY: path.read_bytes()})
        pq.write_table(changed, path)
        return load_table(path)

    return whole.schema.metadata[METADATA_KEY], file(read, "t.parquet")


def stores(place: Path) -> tuple[bytes, Reader]:
    from routepilot.env.store import RecordStore

    with RecordStore(place / "sound.sqlite") as store:
        store.put_table(synthetic.table(1))
    sound = (place / "sound.sqlite").read_bytes()

    def read(path: Path) -> None:
        for more in ("-wal", "-shm"):
            path.with_name(path.name + more).unlink(missing_ok=True)
        with RecordStore(path) as store:
            for target in store.targets():
                store.table(target.key)

    return sound, file(read, "s.sqlite")


def policies(place: Path) -> tuple[bytes, Reader]:
    from routepilot.agents.policy import load_policy
    from routepilot.training.defaults import checkpoints_folder, released_policies

    source = checkpoints_folder() / f"{released_policies()[0]}.safetensors"
    sound = source.with_suffix(".json").read_bytes()
    (place / "p.safetensors").write_bytes(source.read_bytes()[:-1])

    def read(path: Path) -> object:
        return load_policy(path.with_suffix(".safetensors"))

    return sound, file(read, "p.json")


def weights(place: Path) -> tuple[bytes, Reader]:
    import hashlib

    from routepilot.agents import policy
    from routepilot.training.defaults import checkpoints_folder, released_policies

    source = checkpoints_folder() / f"{released_policies()[0]}.safetensors"
    card = policy.read_card(source)
    sound = source.read_bytes()[:3000]

    def read(path: Path) -> object:
        from dataclasses import replace

        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return policy._read_weights(path, replace(card, weights_sha256=digest))

    return sound, file(read, "w.safetensors")


def models(place: Path) -> tuple[bytes, Reader]:
    from routepilot.env.inputs import generate
    from routepilot.env.normalise import fingerprint_of, fix_inputs, normalise, read_model
    from routepilot.training.doctor import tiny_model

    tiny_model(place)
    sound = (place / "tiny.onnx").read_bytes()

    def read(path: Path) -> None:
        proto = read_model(path)
        specs = fix_inputs(proto, {}, [])
        fingerprint_of(normalise(proto, path))
        generate(proto, specs, 0, 1)

    return sound, file(read, "m.onnx")


def bundles(place: Path) -> tuple[bytes, Reader]:
    from routepilot.env.models import Model
    from routepilot.training.doctor import tiny_model

    model = tiny_model(place)
    return (model.folder / "model.json").read_bytes(), file(
        lambda path: Model.load(path.parent), "model.json"
    )


def input_sets(place: Path) -> tuple[bytes, Reader]:
    from routepilot.env.inputs import read_npz

    np.savez(place / "sound.npz", x=np.zeros((4, 8), np.float32), y=np.arange(3))
    return (place / "sound.npz").read_bytes(), file(read_npz, "i.npz")


def shapes() -> tuple[bytes, Reader]:
    from routepilot.env.models import parse_shape

    return b"input=1x3x224x224", text(parse_shape)


def limits() -> tuple[bytes, Reader]:
    from routepilot.training.inputs import gate_from_options

    return b"output=0.05", text(lambda words: gate_from_options("rel_l2", 1e-2, [words]))


def recipes(place: Path) -> tuple[bytes, Reader]:
    from routepilot.training.recipe import find_recipe, make_recipe, read_recipe

    def read(path: Path) -> None:
        make_recipe(read_recipe(path), path.name)

    return find_recipe("cpu").read_bytes(), file(read, "r.yaml")


def settings() -> tuple[bytes, Reader]:
    from routepilot.training.recipe import make_recipe, read_setting

    def read(words: str) -> None:
        make_recipe(dict([read_setting(words)]), "--set")

    return b"prices=[0.002, 0.01]", text(read)


def results(place: Path) -> tuple[bytes, Reader]:
    from routepilot.training.report import write_report

    result = {
        "model": "m", "fingerprint": "f", "backend": "cpu", "target": {"device": "d", "key": "k"},
        "policy": "p", "route": "-a=1", "is_default": False, "speedup": 1.5, "speedup_low": 1.4,
        "speedup_high": 1.6, "builds": 1, "builds_total": 4, "seconds": 3.0, "note": "",
        "default_latency_ms": 1.0, "manifest": {"seed": 0, "gate": {"limit": 0.01}},
        "trials": [{"route": "-a=1", "status": "ok", "reason": "", "speedup": 1.5,
                    "losses": {"rel_l2": 0.0}, "build_seconds": 0.1}],
    }  # fmt: skip
    return json.dumps(result).encode(), file(lambda p: write_report(p.parent), "result.json")


PLAIN = {f.__name__: f for f in (
    expressions, routes, tuning_caches, knob_lists, shapes, limits, settings)}  # fmt: skip
IN_FOLDER = {f.__name__: f for f in (
    recipes, tables, table_texts, stores, policies, weights, models, bundles, input_sets, results,
)}  # fmt: skip
