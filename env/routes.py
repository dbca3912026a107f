"""Knobs, catalogs and routes: what can be decided, and its one written form.

Owns the words of the problem and the grammar of route expressions, for every backend. Knows no
compiler, no model and no agent.

A route is written as the vendor writes it: `-name=value` tokens, here in catalog order and with
defaults left out, so that equal routes have equal strings and the default route is the empty one.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from routepilot.env.errors import RouteError
from routepilot.env.wording import counted

#: Words that stand for "any integer" in the value lists TensorRT prints.
UNBOUNDED_FORMS = ("int", "int32_t")

#: The one way an integer is written, so that equal routes have equal strings.
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


@dataclass(frozen=True)
class Knob:
    """One decision of a compiler.

    Attributes:
        name: Vendor's name, leading dash included, e.g. `-graph`.
        values: Values to try, in listed order. Empty for an unbounded knob nobody declared
            values for.
        default: Value the compiler takes when the knob is not set. May lie outside `values`.
        help: One sentence for people.
        marks: Words that say what the knob is about, e.g. `precision`, `fusion`, `unsafe`.
        bounded: False when the compiler accepts values beyond `values` (any integer).
    """

    name: str
    values: tuple[str, ...]
    default: str
    help: str = ""
    marks: tuple[str, ...] = ()
    bounded: bool = True

    def __post_init__(self) -> None:
        if len(self.name) < 2 or self.name[0] != "-" or not _is_word(self.name):
            raise RouteError(
                f"knob name {self.name!r} is not allowed: it is a dash and a word without space,"
                " '=', '[', ']' or '|'; rename the knob"
            )
        if len(set(self.values)) != len(self.values):
            raise RouteError(f"knob {self.name} lists a value twice: {'|'.join(self.values)}")
        for value in self.all_values:
            if not _is_word(value):
                raise RouteError(
                    f"knob {self.name} has the value {value!r}: a value is a word without space,"
                    " '=', '[', ']' or '|'; rename the value"
                )

    @property
    def all_values(self) -> tuple[str, ...]:
        """Every value worth a column: the default first when it is not listed."""
        return self.values if self.default in self.values else (self.default, *self.values)

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Listed values other than the default, in listed order."""
        return tuple(v for v in self.values if v != self.default)

    def allows(self, value: str) -> bool:
        """True when the compiler takes `value` (any integer for an unbounded knob)."""
        if value in self.all_values:
            return True
        return not self.bounded and _INTEGER.fullmatch(value) is not None

    @property
    def allowed(self) -> str:
        """The values `allows` takes, for messages."""
        return "|".join(self.all_values) + ("" if self.bounded else "|any integer")


def _is_word(text: str) -> bool:
    return bool(text) and not any(c.isspace() or c in "=[]|" for c in text)


@dataclass(frozen=True)
class Requirement:
    """A value of one knob means something only beside certain values of another.

    Attributes:
        knob: Knob that is constrained.
        value: The constrained value; None for every value other than the default.
        parent: Knob it depends on.
        parent_values: Values of the parent under which it means something.
        why: One clause that explains it, for refusals.
    """

    knob: str
    value: str | None
    parent: str
    parent_values: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Route:
    """A choice of values for some knobs; knobs not named stay at their defaults.

    Attributes:
        settings: `(name, value)` pairs. Made by a `Catalog`, they are in catalog order and
            without defaults.
    """

    settings: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings)

    @cached_property
    def values(self) -> Mapping[str, str]:
        """The settings as a mapping from knob name to value."""
        return dict(self.settings)

    @property
    def is_default(self) -> bool:
        """True for the route that changes nothing."""
        return not self.settings

    @property
    def key(self) -> str:
        """Stable 16-digit hash of the canonical string, equal on every machine."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    @classmethod
    def read(cls, text: str) -> Route:
        """Read `-name=value` tokens without a catalog, for example from a table.

        Raises:
            RouteError: A token is not of the form, or a knob is named twice.
        """
        settings: dict[str, str] = {}
        for token in text.split():
            name, equals, value = token.partition("=")
            if not equals or not name.startswith("-") or len(name) < 2 or not value:
                raise RouteError(
                    f"route token {token!r} is not of the form -name=value; write for example"
                    " -graph=basic"
                )
            if name in settings:
                raise RouteError(f"route names the knob {name} twice ({token!r}); name it once")
            settings[name] = value
        return cls(tuple(settings.items()))


#: The route a user gets who types nothing.
DEFAULT_ROUTE = Route()


@dataclass(frozen=True)
class Catalog:
    """The ordered knobs of one compiler version, and which combinations mean something.

    Attributes:
        name: Backend the catalog belongs to.
        version: Opaque equality key, e.g. the tuner version.
        knobs: In the vendor's order.
        requirements: Combinations that mean nothing are masked by these.
        settled: Routes (canonical strings) that need not be built -> why: they are known to give
            the default's engine. Routes that hold their settings beside others are not.
    """

    name: str
    version: str
    knobs: tuple[Knob, ...]
    requirements: tuple[Requirement, ...] = ()
    settled: Mapping[str, str] = field(default_factory=dict, hash=False)
    _order: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        order = {knob.name: i for i, knob in enumerate(self.knobs)}
        if len(order) != len(self.knobs):
            raise RouteError(f"catalog {self.name} names a knob twice")
        for rule in self.requirements:
            for name in (rule.knob, rule.parent):
                if name not in order:
                    raise RouteError(f"a requirement of catalog {self.name} names no knob: {name}")
        object.__setattr__(self, "_order", order)

    def __contains__(self, name: str) -> bool:
        return name in self._order

    def __getitem__(self, name: str) -> Knob:
        """The knob of that name.

        Raises:
            RouteError: There is no such knob; the message names the nearest ones.
        """
        try:
            return self.knobs[self._order[name]]
        except KeyError:
            raise RouteError(self.unknown(name)) from None

    def unknown(self, name: str) -> str:
        """What to say of a name that is no knob: the nearest names."""
        import difflib

        near = difflib.get_close_matches(name, self._order, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else "`routepilot knobs` lists them all"
        return (
            f"knob {name!r} is not in the {self.name} catalog"
            f" ({counted(len(self.knobs), 'knob')}); {hint}"
        )

    def route(self, settings: Mapping[str, str]) -> Route:
        """The canonical route with these settings: validated, ordered, defaults left out.

        Raises:
            RouteError: Unknown knob, or a value the knob does not allow.
        """
        chosen: list[tuple[int, str, str]] = []
        for name, value in settings.items():
            knob = self[name]
            if not knob.allows(value):
                raise RouteError(f"knob {name} does not allow {value!r}; allowed: {knob.allowed}")
            if value != knob.default:
                chosen.append((self._order[name], name, value))
        return Route(tuple((name, value) for _, name, value in sorted(chosen)))

    def parse(self, text: str) -> Route:
        """Read a route and bring it into canonical form.

        Raises:
            RouteError: Bad token, unknown knob or value; the message names the token.
        """
        return self.route(Route.read(text).values)

    def changed(self, route: Route, name: str, value: str) -> Route:
        """`route` with one knob set to another value."""
        return self.route({**route.values, name: value})

    def full_settings(self, route: Route) -> dict[str, str]:
        """Every knob's value under `route`, defaults included, in catalog order."""
        return {knob.name: route.values.get(knob.name, knob.default) for knob in self.knobs}

    def objection(self, route: Route) -> str | None:
        """Why this combination means nothing, or None when it is legal."""
        if self.settled and str(route) in self.settled:
            return f"{route} need not be built: {self.settled[str(route)]}"
        for rule in self.requirements:
            value = route.values.get(rule.knob)
            if value is None or value == self[rule.knob].default:
                continue
            if rule.value is not None and value != rule.value:
                continue
            parent = route.values.get(rule.parent, self[rule.parent].default)
            if parent not in rule.parent_values:
                needed = "|".join(rule.parent_values)
                return f"{rule.knob}={value} needs {rule.parent}={needed}: {rule.why}"
        return None

    def is_legal(self, route: Route) -> bool:
        """True when every setting of the route means something beside the others."""
        return self.objection(route) is None

    def neighbours(self, route: Route) -> list[Route]:
        """Legal routes that differ from `route` in the value of one knob."""
        found = []
        for knob in self.knobs:
            current = route.values.get(knob.name, knob.default)
            for value in knob.all_values:
                if value != current:
                    candidate = self.changed(route, knob.name, value)
                    if self.is_legal(candidate):
                        found.append(candidate)
        return found

    def declare(self, name: str, values: Iterable[str]) -> Catalog:
        """A catalog in which the unbounded knob `name` lists `values` to try.

        Raises:
            RouteError: The knob is unknown or bounded, or a value is not an integer.
        """
        knob = self[name]
        values = tuple(values)
        if knob.bounded:
            raise RouteError(
                f"knob {name} is bounded ({knob.allowed}); there is nothing to declare"
            )
        for value in values:
            if not knob.allows(value):
                raise RouteError(f"knob {name} does not allow {value!r}; allowed: {knob.allowed}")
        declared = replace(knob, values=values)
        knobs = tuple(declared if k.name == name else k for k in self.knobs)
        return replace(self, knobs=knobs)

    @cached_property
    def key(self) -> str:
        """Stable hash over name, version and every knob: what makes records comparable."""
        text = "\n".join(
            [self.name, self.version]
            + [f"{k.name}\t{'|'.join(k.values)}\t{k.default}\t{k.bounded}" for k in self.knobs]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Expression:
    """A parsed route expression: which knobs vary over which values, which are pinned.

    Attributes:
        terms: `(knob name, values)` in the order written; one value means pinned by `=`,
            a tuple from brackets varies.
        varying: Names written with brackets.
    """

    terms: tuple[tuple[str, tuple[str, ...]], ...]
    varying: frozenset[str]

    @property
    def variables(self) -> list[tuple[str, tuple[str, ...]]]:
        """The varying terms in the order written."""
        return [(name, values) for name, values in self.terms if name in self.varying]

    @property
    def pinned(self) -> dict[str, str]:
        """The settings every route of the expression shares."""
        return {name: values[0] for name, values in self.terms if name not in self.varying}

    def count_full(self) -> int:
        """How many routes the Cartesian product holds."""
        return math.prod(len(values) for _, values in self.variables)

    def full(self) -> Iterator[dict[str, str]]:
        """Settings of the Cartesian product; the last token varies fastest, as in trtexec."""
        names = [name for name, _ in self.variables]
        for values in itertools.product(*(values for _, values in self.variables)):
            yield {**self.pinned, **dict(zip(names, values, strict=True))}

    def fast(self, catalog: Catalog) -> Iterator[dict[str, str]]:
        """Baseline, then one change at a time: knobs right to left, values as listed."""
        baseline = {name: catalog[name].default for name, _ in self.variables}
        yield {**self.pinned, **baseline}
        for name, values in reversed(self.variables):
            for value in values:
                if value != catalog[name].default:
                    yield {**self.pinned, **baseline, name: value}


def sweep_expression(catalog: Catalog) -> Expression:
    """The expression that varies every knob which lists a value other than its default.

    A default outside the list is swept too, or the full product would never hold it.
    """
    terms = tuple((k.name, k.all_values) for k in catalog.knobs if k.alternatives)
    return Expression(terms, frozenset(name for name, _ in terms))


def parse_expression(text: str, catalog: Catalog) -> Expression:
    """Parse trtexec's `-knob=[a|b|c] -knob=x` against a catalog.

    Raises:
        RouteError: Every error of trtexec's parser, naming the token: no `=`, unknown knob, text
            before `[` or after `]`, `...` inside a list, empty list, duplicate value, value not
            allowed, a list on an unbounded knob with no declared values, a knob named twice.
    """
    terms: dict[str, tuple[str, ...]] = {}
    varying: set[str] = set()
    for token in split_expression(text):
        if any(mark in token for mark in "'\"") or token.startswith("--"):
            raise RouteError(
                f"token {token!r} belongs to a shell; give the expression alone, without quotation"
                " marks and without --tuneBuildRoutes="
            )
        name, equals, right = token.partition("=")
        if not equals:
            raise RouteError(f"token {token!r} has no '='; write -knob=value or -knob=[a|b]")
        if name not in catalog:
            raise RouteError(f"token {token!r}: {catalog.unknown(name)}")
        knob = catalog[name]
        if name in terms:
            raise RouteError(f"token {token!r} names the knob {name} a second time; name it once")
        if "[" in right or "]" in right:
            terms[name] = _bracket_values(token, right, knob)
            varying.add(name)
        else:
            terms[name] = (_pinned_value(token, right, knob),)
    if not terms:
        raise RouteError("the route expression is empty; write for example '-graph=[all|basic]'")
    return Expression(tuple(terms.items()), frozenset(varying))


def read_expression_file(path: Path, catalog: Catalog) -> Expression:
    """Parse a file of expression tokens separated by spaces or line ends (no comments).

    Raises:
        RouteError: The file cannot be read, or as `parse_expression`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows puts a mark at the beginning
    except (OSError, ValueError) as error:
        raise RouteError(
            f"route file {str(path)!r} cannot be read: {error}; it must be a text file in UTF-8"
        ) from None
    return parse_expression(" ".join(text.split()), catalog)


def split_expression(text: str) -> list[str]:
    """Tokens of an expression: split on white space outside brackets."""
    tokens: list[str] = []
    inside = False
    current = ""
    for char in text:
        inside = char == "[" or (inside and char != "]")
        if char.isspace() and not inside:
            if current:
                tokens.append(current)
            current = ""
        else:
            current += char
    if current:
        tokens.append(current)
    return tokens


def _bracket_values(token: str, right: str, knob: Knob) -> tuple[str, ...]:
    before, opening, rest = right.partition("[")
    inside, closing, after = rest.partition("]")
    if not opening or not closing:
        missing = "]" if opening else "["
        raise RouteError(f"token {token!r} has no {missing!r}; write {knob.name}=[a|b]")
    if before:
        raise RouteError(f"token {token!r} has text before '['; write {knob.name}=[a|b]")
    if after:
        raise RouteError(f"token {token!r} has text after ']'; write {knob.name}=[a|b]")
    values = tuple(value.strip() for value in inside.split("|"))
    if not inside.strip():
        raise RouteError(f"token {token!r} has an empty list; allowed: {knob.allowed}")
    if "..." in values:
        raise RouteError(f"token {token!r} has '...' inside the list; write each value out")
    if len(set(values)) != len(values):
        raise RouteError(f"token {token!r} lists a value twice; list each value once")
    if not knob.bounded and not knob.values:
        raise RouteError(
            f"token {token!r} lists values of the unbounded knob {knob.name}; pin one value with"
            f" {knob.name}=N, or declare the values to try first"
        )
    for value in values:
        if not knob.allows(value):
            raise RouteError(
                f"token {token!r}: value {value!r} is not allowed; allowed: {knob.allowed}"
            )
    return values


def _pinned_value(token: str, value: str, knob: Knob) -> str:
    if not value:
        raise RouteError(f"token {token!r} has no value; write {knob.name}=value")
    if value in UNBOUNDED_FORMS and value not in knob.all_values:
        raise RouteError(f"token {token!r} names a type, not a value; write an integer")
    if not knob.allows(value):
        raise RouteError(
            f"token {token!r}: value {value!r} is not allowed; allowed: {knob.allowed}"
        )
    return value


def combine(catalog: Catalog, settings: Iterable[Mapping[str, str]]) -> list[Route]:
    """Canonical routes of many settings, legal ones only, each once, in order."""
    routes = dict.fromkeys(catalog.route(s) for s in settings)
    return [route for route in routes if catalog.is_legal(route)]


def differing(a: Route, b: Route) -> Sequence[str]:
    """Names of the knobs in which two routes differ."""
    names = dict.fromkeys([*a.values, *b.values])
    return [name for name in names if a.values.get(name) != b.values.get(name)]
