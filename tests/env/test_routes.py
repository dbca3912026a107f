"""Knobs, routes and expressions: round trips, every refusal, trtexec's counts and order."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepilot.env.errors import RouteError
from routepilot.env.routes import (
    DEFAULT_ROUTE,
    Catalog,
    Knob,
    Requirement,
    Route,
    parse_expression,
    read_expression_file,
    sweep_expression,
)

WORD = st.text(string.ascii_letters + string.digits + ":_.", min_size=1, max_size=8)


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    names = draw(st.lists(WORD, min_size=1, max_size=6, unique=True))
    knobs = []
    for name in names:
        values = tuple(draw(st.lists(WORD, min_size=1, max_size=4, unique=True)))
        knobs.append(Knob(f"-{name}", values, draw(st.sampled_from(values))))
    return Catalog("made", "1", tuple(knobs))


@given(catalogs(), st.data())
def test_printed_routes_are_read_back(catalog: Catalog, data: st.DataObject) -> None:
    settings = {k.name: data.draw(st.sampled_from(k.values)) for k in catalog.knobs}
    route = catalog.route(settings)
    assert catalog.parse(str(route)) == route == Route.read(str(route))
    assert catalog.full_settings(route) == settings
    backwards = catalog.route(dict(reversed(settings.items())))
    assert (backwards, backwards.key) == (route, route.key)
    assert str(catalog.route({k.name: k.default for k in catalog.knobs})) == ""


@given(catalogs())
def test_counts_of_sweeps(catalog: Catalog) -> None:
    expression = sweep_expression(catalog)
    fast = list(expression.fast(catalog))
    assert len(fast) == 1 + sum(len(k.alternatives) for k in catalog.knobs)
    assert len(list(expression.full())) == expression.count_full()


#: Rows of the vendor's knob list, as it prints them.
TENSORRT = Catalog(
    "tensorrt",
    "2.19.45",
    (
        Knob("-conv_lowering", ("on", "off"), "on"),
        Knob("-kgen:tiling", ("0", "1", "2"), "2"),
        Knob("-kgen:codegen:cuda_tile", ("0", "1", "2", "3"), "1"),
        Knob("-cask_fusion:num_tactics", (), "20", bounded=False),
        Knob("-peep:max", ("1", "2"), "0", bounded=False),
    ),
)


def test_golden_order_of_fast_and_full() -> None:
    expression = parse_expression("-conv_lowering=[on|off] -kgen:tiling=[0|1|2]", TENSORRT)
    names = ("-conv_lowering", "-kgen:tiling")
    fast = [tuple(s[n] for n in names) for s in expression.fast(TENSORRT)]
    assert fast == [("on", "2"), ("on", "0"), ("on", "1"), ("off", "2")]
    full = [tuple(s[n] for n in names) for s in expression.full()]
    assert full == [(a, b) for a in ("on", "off") for b in ("0", "1", "2")]


def test_pinned_terms_are_in_every_route_and_add_none() -> None:
    expression = parse_expression("-kgen:tiling=[0|2] -cask_fusion:num_tactics=7", TENSORRT)
    routes = list(expression.fast(TENSORRT))
    assert len(routes) == 2
    assert all(route["-cask_fusion:num_tactics"] == "7" for route in routes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("-kgen:tiling", "no '='"),
        ("-kgen:tilings=0", "-kgen:tiling"),
        ("-kgen:tiling=x[0|1]", "before '['"),
        ("-kgen:tiling=[0|1]x", "after ']'"),
        ("-kgen:tiling=[0|1", "no ']'"),
        ("-kgen:tiling=[0|...]", "'...'"),
        ("-kgen:tiling=[]", "empty list"),
        ("-kgen:tiling=[0|0]", "twice"),
        ("-kgen:tiling=[0|7]", "'7' is not allowed"),
        ("-kgen:tiling=9", "'9' is not allowed"),
        ("-kgen:tiling=", "no value"),
        ("-cask_fusion:num_tactics=[1|2]", "unbounded"),
        ("-cask_fusion:num_tactics=int32_t", "names a type"),
        ("-kgen:tiling=0 -kgen:tiling=1", "second time"),
        ("-kgen:tiling=[0|1] -kgen:tiling=2", "second time"),
        ("  \t\n ", "empty"),
        ("-peep:max=[1|2|...]", "'...'"),
        ("-kgen:tiling=[0||1]", "'' is not allowed"),
        ("-kgen:tiling=[0,1]", "'0,1' is not allowed"),
        ("-kgen:tiling =[0|1]", "no '='"),
        ("'-kgen:tiling=[0|1]'", "quotation marks"),
        ('-kgen:tiling="0"', "quotation marks"),
        ("--tuneBuildRoutes=-kgen:tiling=[0|1]", "without --tuneBuildRoutes="),
    ],
)
def test_every_error_of_the_expression_parser(text: str, words: str) -> None:
    with pytest.raises(RouteError) as refusal:
        parse_expression(text, TENSORRT)
    assert words in str(refusal.value)
    if "=" in text:
        assert text.split()[-1].split("=")[0] in str(refusal.value)


@pytest.mark.parametrize("space", [" ", "\t", "\n", "\r\n", "  \r\n\t"])
def test_white_space_of_any_kind_parts_tokens(space: str) -> None:
    text = f"{space}-kgen:tiling=[0{space}|1]{space}-peep:max=7{space}"
    expression = parse_expression(text, TENSORRT)
    assert expression.terms == (("-kgen:tiling", ("0", "1")), ("-peep:max", ("7",)))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_expression_files_of_every_system_read_alike(tmp_path: Path, mark: str, end: str) -> None:
    path = tmp_path / "routes.txt"
    path.write_bytes(f"{mark}-kgen:tiling=[0|1]{end}-conv_lowering=off{end}".encode())
    expression = read_expression_file(path, TENSORRT)
    assert expression.terms == (("-kgen:tiling", ("0", "1")), ("-conv_lowering", ("off",)))
    path.write_bytes("-kgen:tiling=[0|1]".encode("utf-16"))
    with pytest.raises(RouteError, match="text file in UTF-8"):
        read_expression_file(path, TENSORRT)


def test_expression_file(tmp_path: Path) -> None:
    path = tmp_path / "routes.txt"
    path.write_text("-kgen:tiling=[0 | 1]\n-conv_lowering=off\n")
    expression = read_expression_file(path, TENSORRT)
    assert expression.terms == (("-kgen:tiling", ("0", "1")), ("-conv_lowering", ("off",)))
    with pytest.raises(RouteError, match="cannot be read"):
        read_expression_file(tmp_path / "absent.txt", TENSORRT)


def test_declared_values_of_an_unbounded_knob_can_be_swept() -> None:
    declared = TENSORRT.declare("-cask_fusion:num_tactics", ("5", "10"))
    expression = parse_expression("-cask_fusion:num_tactics=[5|10]", declared)
    assert len(list(expression.fast(declared))) == 3
    with pytest.raises(RouteError, match="bounded"):
        TENSORRT.declare("-kgen:tiling", ("0",))
    with pytest.raises(RouteError, match="any integer"):
        TENSORRT.declare("-peep:max", ("many",))


def test_requirements_mask_what_means_nothing() -> None:
    rule = Requirement("-spin", "off", "-threads", ("2",), "one thread waits for none")
    knobs = (Knob("-threads", ("1", "2"), "2"), Knob("-spin", ("on", "off"), "on"))
    catalog = Catalog("made", "1", knobs, (rule,))
    assert catalog.is_legal(catalog.parse("-spin=off"))
    bad = catalog.parse("-threads=1 -spin=off")
    assert catalog.objection(bad) == "-spin=off needs -threads=2: one thread waits for none"
    assert bad not in catalog.neighbours(catalog.parse("-spin=off"))
    assert len(catalog.neighbours(DEFAULT_ROUTE)) == 2


@pytest.mark.parametrize("text", ["graph=all", "-graph", "-=x", "-graph=", "-a=1 -a=2"])
def test_bad_route_tokens_are_named(text: str) -> None:
    with pytest.raises(RouteError) as refusal:
        Route.read(text)
    assert text.split()[-1] in str(refusal.value)


def test_keys_do_not_depend_on_the_machine() -> None:
    route = TENSORRT.parse("-kgen:tiling=0 -conv_lowering=off")
    assert str(route) == "-conv_lowering=off -kgen:tiling=0"
    assert DEFAULT_ROUTE.key == "e3b0c44298fc1c14"
    assert TENSORRT.key != TENSORRT.declare("-peep:max", ("1",)).key
