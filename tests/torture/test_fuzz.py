"""Hostile input: whatever is read answers with its own error, in bounded time and memory.

Each reader is given mutations of a sound input: bytes flipped, cut, doubled and spliced, words of
its grammar put anywhere. Anything but a `RoutePilotError` fails, as does one input over `SECONDS`
of work or of sleep, one that does not come back, or growth of the process beyond `MEMORY`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import string
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile_backend
import numpy as np
import psutil
import pytest
import synthetic
from sizes import report, sequence, size
from watchdog import NotBack, Watchdog

from routepilot.env.errors import RoutePilotError
from routepilot.env.routes import Catalog

SECONDS, MEMORY = 5.0, 400 << 20

#: Seconds on the clock after which a reader is not waited for any more, on a busy machine too.
BACK = 120.0

Reader = Callable[[Path, bytes], object]

WORDS = [
    b"\x00", b"\xff\xfe", b"\n", b"{", b"}", b"[", b"]", b"|", b"=", b"-", b'"', b"'", b",", b":",
    b"null", b"NaN", b"Infinity", b"-1", b"0", b"1e999", b"9" * 30, b"true", b"[[[[[[[[", b"{}" * 5,
    b"\\u0000", b"\\ud800",
    "é\u202e\U0001f600".encode(), b"../../../etc/passwd", b"%s%n", b"A" * 300,
]  # fmt: skip


def mutate(rng: random.Random, data: bytes) -> bytes:
    """One to eight small injuries."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, to = sorted(rng.randrange(len(out) + 1) for _ in range(2))
        match rng.randrange(7):
            case 0 if out:
                out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[rng.randrange(len(out))] = rng.randrange(256)
            case 2:
                del out[at : min(to, at + rng.randrange(1, 40))]
            case 3:
                out[at:at] = rng.choice(WORDS)
            case 4:
                out[at:at] = out[at : min(to, at + 200)]
            case 5:
                piece = bytes(out[at : min(to, at + 20)])
                out[at : at + len(piece)] = rng.choice(WORDS)
            case _:
                if rng.random() < 0.1:
                    del out[at:]
                elif out:
                    out[rng.randrange(len(out))] = ord(rng.choice(string.printable))
    return bytes(out)


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


VERBS = (
    "tune none.onnx -o o -b cpu --policy p --agent random --max-builds 3 --max-seconds 1.5 --seed 1"
    " --shape x=1x3 --inputs i.npz --tolerance 0.01 --metric l0 --limit y=0.1 --threads 1 --json",
    "compare none.onnx --agents default,fast --table t --max-builds 2 --deadline 3 -o o",
    "features none.onnx --shape x=1x3 --json",
    "knobs --backend onnxruntime --threads 1 --json",
    "report nowhere",
    "records describe none.parquet --tolerance 0.01",
    "collect -o o/t.parquet --models none.onnx --routes 3 --controls 1 --workers 1 --seed 0",
    "train --table none --hold-out a,b -o o --name p",
    "evaluate --table none --agents random --seeds 1 -o o",
    "zoo export -o o --names none",
    "live none.onnx --json",
)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """The current folder for a while; `contextlib.chdir` is not in Python 3.10."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_line(app: Callable[..., object], words: list[str], where: Path) -> None:
    """Run a command line in this process, in that folder; a refusal is an error of ours."""
    heard = io.StringIO()
    with working_in(where):
        try:
            with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
                app(words, standalone_mode=True)
        except SystemExit as stop:
            if stop.code not in (0, None):
                raise RoutePilotError("refused") from None


def options(place: Path) -> tuple[bytes, Reader]:
    """Command lines, run in this process in an empty folder."""
    import typer

    from routepilot.training import cli, cli_corpus, cli_learning, cli_nvidia  # noqa: F401

    rng, app = random.Random(1), typer.main.get_command(cli.app)  # made once: it takes a while

    def read(where: Path, data: bytes) -> None:
        verb = rng.choice(VERBS).split()
        if data != b"sound":
            for _ in range(rng.choice((1, 1, 2))):
                at = rng.randrange(1, len(verb))
                word = mutate(rng, verb[at].encode(errors="surrogateescape")).decode(
                    errors="surrogateescape"
                )
                verb[at] = word.replace("\0", "")
        run_line(app, verb, where)

    return b"sound", read


#: A line of each verb that ends at an input that is not there, and takes any option more.
ENDS = (
    "tune none.onnx -o o", "compare none.onnx -o o", "knobs -b onnxruntime", "features none.onnx",
    "agents", "doctor -b none", "report nowhere", "demo -o /dev/null/o --max-builds -1",
    "collect --models none.onnx -o o/t.parquet", "leakage --table none.parquet",
    "confirm-live none.onnx -o o", "explain nowhere", "importance none.parquet",
    "train --table none.parquet -o o", "evaluate --table none.parquet -o o", "live none.onnx",
    "engine none.plan", "zoo list", "zoo export -o o --names none", "zoo check --names none",
    "policy list", "policy show none", "policy push none ./o/none", "policy pull ./none -o o",
    "records describe none.parquet", "records export none.sqlite -o o", "records import none.json",
    "records merge none.sqlite -o o.sqlite",
)  # fmt: skip


def verbs() -> dict[str, list[str]]:
    """Every verb of the command line -> its options, flags with a `=`."""
    import typer

    from routepilot.training import (  # noqa: F401  (they add verbs)
        cli,
        cli_corpus,
        cli_evidence,
        cli_insight,
        cli_learning,
        cli_nvidia,
        cli_policy,
        cli_records,
    )

    found: dict[str, list[str]] = {}

    def walk(command: Any, name: str) -> None:
        for inner, child in getattr(command, "commands", {}).items():
            walk(child, f"{name} {inner}".strip())
        if not hasattr(command, "commands"):
            options = [p for p in command.params if p.param_type_name == "option"]
            found[name] = [p.opts[-1] + "=" * bool(p.is_flag) for p in options]

    walk(typer.main.get_command(cli.app), "")
    return found


def every_option(place: Path) -> tuple[bytes, Reader]:
    """Each option of each verb in turn, with whatever comes, run as `options` does."""
    import typer

    from routepilot.training import cli

    lines = {
        name: next(end for end in ENDS if end == name or end.startswith(f"{name} "))
        for name in verbs()
    }
    app = typer.main.get_command(cli.app)
    turns = itertools.cycle([(n, option) for n, some in verbs().items() for option in some])

    def read(where: Path, data: bytes) -> None:
        name, option = next(turns)
        value = data.decode(errors="surrogateescape").replace("\0", "")
        words = [option[:-1]] if option.endswith("=") else [option, value]
        line = [*lines[name].split(), *words]
        try:
            run_line(app, line, where)
        except NotBack:
            raise NotBack(f"{line} does not end") from None

    return b"1,2:x=3", read


PLAIN = {f.__name__: f for f in (
    expressions, routes, tuning_caches, knob_lists, shapes, limits, settings)}  # fmt: skip
READERS = (
    options, every_option, recipes, tables, table_texts, stores, policies, weights, models,
    bundles, input_sets, results,
)  # fmt: skip
IN_FOLDER = {f.__name__: f for f in READERS}

#: Share of all inputs that a reader gets; the slow ones get less.
SHARE = {"expressions": 16, "routes": 16, "tuning_caches": 16, "knob_lists": 10, "shapes": 12,
         "limits": 10, "tables": 3, "table_texts": 3, "stores": 2, "policies": 5, "weights": 3,
         "models": 2, "bundles": 4, "input_sets": 4, "results": 4, "options": 4,
         "every_option": 8, "recipes": 4, "settings": 4}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*PLAIN, *IN_FOLDER])
def test_nothing_but_our_errors(name: str, tmp_path: Path) -> None:
    count = max(1, size("inputs") * SHARE[name] // sum(SHARE.values()))
    rng = random.Random(f"{name} {sequence()}")
    sound, read = PLAIN[name]() if name in PLAIN else IN_FOLDER[name](tmp_path)
    place = tmp_path / "fuzz"
    place.mkdir()
    before = psutil.Process().memory_info().rss
    refused, dog = 0, Watchdog(SECONDS, SECONDS, BACK)
    for number in range(count):
        data = sound if number == 0 else mutate(rng, sound)
        try:
            with dog.watched():
                read(place, data)
        except RoutePilotError as error:
            refused += 1
            assert str(error) and len(str(error)) < 5_000
        except BaseException as error:
            (tmp_path / "culprit").write_bytes(data)
            raise AssertionError(f"{name}: {data[:400]!r} gave {error!r}") from error
    grown = psutil.Process().memory_info().rss - before
    assert grown < MEMORY
    seconds = {"busiest": round(dog.busiest, 3), "sleepiest": round(dog.sleepiest, 3)}
    report("fuzz", reader=name, inputs=count, refused=refused, grown_mib=grown >> 20, **seconds)
    assert refused > 0
    assert hostile_backend.CATALOG


def swallow() -> None:
    while True:
        try:
            time.sleep(1000)
        except Exception:
            continue


def sleep_and_refuse() -> None:
    time.sleep(0.4)
    raise RoutePilotError("no")


def lean_on_a_thread() -> None:
    worker = threading.Thread(target=lambda: sum(i * i for i in range(3_000_000)))
    worker.start()
    worker.join()


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (lambda: time.sleep(0.4), "s asleep"),
        (sleep_and_refuse, "s asleep"),
        (lambda: threading.Event().wait(0.4), "s asleep"),
        (lambda: sum(i * i for i in range(10_000_000)), "s of work"),
        (swallow, "not back"),
        (lambda: None, ""),
    ],
)
def test_the_watchdog_bites_who_sleeps_works_too_long_or_stays_away(
    deed: Callable[[], object], words: str
) -> None:
    dog = Watchdog(work=0.3, sleep=0.3, back=1.5 if deed is swallow else 60.0)
    caught = ""
    try:
        with dog.watched():
            deed()
    except (AssertionError, NotBack) as error:
        caught = str(error)
    assert words in caught and bool(words) == bool(caught)


def test_the_watchdog_counts_another_thread_as_work() -> None:
    dog = Watchdog(work=0.02, sleep=60.0, back=100.0)
    with pytest.raises(AssertionError, match="s of work"), dog.watched():
        lean_on_a_thread()
