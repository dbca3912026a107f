"""TensorRT's catalog: values, marks, masks, and what is kept out."""

from __future__ import annotations

import json

import fake_tensorrt
import pytest

from routepilot.env.backends import tensorrt_catalog as knobs
from routepilot.env.errors import InputError
from routepilot.env.liveness import known_knobs


def test_shipped_list_is_the_published_one() -> None:
    version, found = knobs.read_build_routes(knobs.shipped_routes_json())
    bounded = [k for k in found if k.bounded]
    assert (version, len(found), len(bounded)) == ("2.19.45", 209, 195)
    assert sum(set(k.values) == {"on", "off"} for k in found) == 188
    assert 1 + sum(len(k.alternatives) for k in bounded) == 206  # `fast` over every bounded knob


def test_catalog_reads_values_marks_and_masks() -> None:
    routes = json.dumps(fake_tensorrt.ROUTES)
    catalog = knobs.make_catalog("tensorrt", "11.1", routes)
    assert catalog.version == "11.1 tuner 2.19.45"
    assert catalog["-kgen:tiling"].values == ("0", "1", "2")
    peep = catalog["-peep:max"]
    assert (peep.bounded, peep.values, peep.default) == (False, ("1", "2"), "0")
    assert catalog["-cask_fusion:num_tactics"].allows("37")
    assert not catalog["-kgen:tiling"].allows("3")
    assert "precision" in catalog["-cask:fp16_acc"].marks
    assert "-mha_fusion:v2:causal_mask" not in catalog
    unsafe = knobs.make_catalog("tensorrt", "11.1", routes, unsafe=True)
    assert "unsafe" in unsafe["-mha_fusion:v2:causal_mask"].marks
    moot = catalog.parse("-conv_lowering=off -conv_lowering:part=on")
    assert "part of -conv_lowering" in (catalog.objection(moot) or "")
    both = catalog.parse("-force_conv_nhwc=on -force_conv_nchw=on")
    assert "one layout" in (catalog.objection(both) or "")


def test_knobs_of_another_tuner_are_sorted_by_their_names() -> None:
    """The list is the machine's: what no one has sorted by hand is marked so, and not trusted."""
    names = ("-mha_fusion:v3:causal_mask", "-gemm:fp32_acc", "-kgen:brand_new", "-slice:ignore_io")
    options = [
        {"option": n, "allowed_values": f"{n}=[on|off]", "default_value": "off", "help": "h"}
        for n in (*names, "-kgen:tiling")
    ]
    routes = json.dumps({"tuner_version": "3.0", "tuner_options": options})
    catalog = knobs.make_catalog("tensorrt", "11.9", routes)
    kept = {k.name: k.marks for k in catalog.knobs if knobs.is_build_route_knob(k.name)}
    assert set(kept) == {"-gemm:fp32_acc", "-kgen:brand_new", "-kgen:tiling"}
    assert {"precision", "new"} <= set(kept["-gemm:fp32_acc"])
    assert "new" in kept["-kgen:brand_new"]
    assert "new" not in kept["-kgen:tiling"]
    assert knobs.unsafe_knobs(routes) == {
        "-mha_fusion:v3:causal_mask": "asserts a causal mask",
        "-slice:ignore_io": "drops a check, by its name",
    }
    assert knobs.unsafe_knobs("") == {}


def test_the_shipped_list_is_sorted_by_hand_alone() -> None:
    assert knobs.unsafe_knobs(knobs.shipped_routes_json()) == {
        name: knobs.UNSAFE[name] for name in (k.name for k in known_knobs()) if name in knobs.UNSAFE
    }
    assert len(knobs.UNSAFE) == 11
    marked = [k for k in map(knobs.marked, known_knobs()) if "precision" in k.marks]
    assert {k.name for k in marked} == knobs.PRECISION


def test_unsafe_and_precision_knobs_exist() -> None:
    names = {k.name for k in knobs.read_build_routes(knobs.shipped_routes_json())[1]}
    assert set(knobs.UNSAFE) <= names
    assert names >= knobs.PRECISION
    assert set(knobs.TRIES) <= names


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("  ", "no build routes"),
        ("nonsense", "known shape"),
        ("{}", "known shape"),
        ('{"tuner_version": "1", "tuner_options": [3]}', "known shape"),
    ],
)
def test_catalog_refuses_other_texts(text: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        knobs.read_build_routes(text)


def test_every_knob_can_be_swept() -> None:
    assert all(knob.alternatives for knob in known_knobs())
