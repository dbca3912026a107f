"""The accuracy gate: how far an engine's outputs may be from the reference.

Owns the losses, the gate and its verdict. Knows no backend, no route and no timing; outputs and
references come in as named arrays.

The five losses of trtexec keep its formulas and defaults; a relative L2 error is added because it
has one scale for all models. What trtexec lets through (NaN, types it skips) is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from routepilot.env.errors import InputError
from routepilot.env.outcomes import Outcome, Status

#: Losses in the order they are reported: trtexec's five, then the relative L2 error.
METRICS = ("l0", "l1", "l2", "lInf", "cos", "rel_l2")

#: Below this product of norms trtexec calls the cosine loss 1.
COSINE_FLOOR = 1e-12

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Gate:
    """What an engine must keep to count as accurate.

    An output fails when its loss is greater than *or equal to* the limit, as in trtexec. The one
    exception is the limit 0, which asks for a loss of exactly 0. A limit of infinity accepts
    every finite loss. NaN, Inf where the reference is finite, a missing output, another shape or
    another type fail at any limit.

    Attributes:
        metric: One of `METRICS`.
        limit: Limit for every output that `per_output` does not name.
        atol: Absolute part of the tolerance `l0` counts with (trtexec's default).
        rtol: Relative part of it (trtexec's default).
        per_output: Output name -> its own limit.
    """

    metric: str = "rel_l2"
    limit: float = 1e-2
    atol: float = 1e-5
    rtol: float = 1e-5
    per_output: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise InputError(
                f"metric {self.metric!r} is not known; choose one of {', '.join(METRICS)}"
            )
        numbers = {"limit": self.limit, "atol": self.atol, "rtol": self.rtol}
        numbers |= {f"limit of output {name!r}": value for name, value in self.per_output.items()}
        for name, value in numbers.items():
            if math.isnan(value) or value < 0:
                raise InputError(f"{name} {value} is not allowed; give a number of 0 or more")

    def limit_of(self, output: str) -> float:
        """The limit that holds for one output."""
        return self.per_output.get(output, self.limit)


@dataclass(frozen=True)
class Verdict:
    """What the gate says of an engine.

    Attributes:
        losses: Worst loss over outputs and input sets, by metric. When the gate has limits per
            output, each output's worst loss of the gate's metric comes along as `metric:output`.
            Empty for invalid outputs.
        status: `OK`, `ACCURACY_FAILED` or `INVALID_OUTPUT`.
        reason: Which output failed and by how much; empty when all is well.
    """

    losses: Mapping[str, float]
    status: Status
    reason: str = ""


def losses(actual: Array, reference: Array, atol: float, rtol: float) -> dict[str, float]:
    """Every loss of one output, in float64.

    With a = actual, r = reference and N elements: `l0` = count(|a-r| > atol + rtol*|r|) / N,
    `l1` = mean |a-r|, `l2` = mean (a-r)^2, `lInf` = max |a-r|, `cos` = 1 - a.r / (|a| |r|) and
    exactly 1 when |a| |r| < 1e-12, `rel_l2` = ||a-r|| / ||r||, which for a zero reference is 0
    when a is zero too and infinite otherwise. The first five are trtexec's (TensorRT 11.1).

    Args:
        actual: Any numeric or boolean type; of the reference's shape.
        reference: Finite, or not finite where `actual` holds the same value; such elements count
            as equal.
        atol: Absolute tolerance of `l0`.
        rtol: Relative tolerance of `l0`.

    Returns:
        Losses by the names of `METRICS`; all 0 for an output without elements.
    """
    a = np.asarray(actual).astype(np.float64).ravel()
    r = np.asarray(reference).astype(np.float64).ravel()
    count = r.size
    finite = np.isfinite(r)
    if not finite.all():
        a, r = a[finite], r[finite]
    if r.size == 0:
        return dict.fromkeys(METRICS, 0.0)
    with np.errstate(over="ignore", under="ignore"):
        error = np.abs(a - r)
        return {
            "l0": float(np.count_nonzero(error > atol + rtol * np.abs(r))) / count,
            "l1": float(error.sum()) / count,
            "l2": float(np.square(error).sum()) / count,
            "lInf": float(error.max()),
            "cos": _cosine_loss(a, r),
            "rel_l2": _ratio(_norm(error), _norm(r)),
        }


def _norm(x: NDArray[np.float64]) -> float:
    """Euclidean norm whose squares neither overflow nor vanish."""
    scale = float(np.abs(x).max())
    if scale == 0.0 or not math.isfinite(scale):
        return scale
    scaled = x / scale
    return scale * math.sqrt(float(scaled @ scaled))


def _ratio(error: float, size: float) -> float:
    if size == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / size


def _cosine_loss(a: NDArray[np.float64], r: NDArray[np.float64]) -> float:
    norm_a, norm_r = _norm(a), _norm(r)
    if norm_a * norm_r < COSINE_FLOOR:
        return 1.0
    return 1.0 - float((a / norm_a) @ (r / norm_r))


def check_outputs(gate: Gate, names: Iterable[str]) -> None:
    """See that a gate limits no output that a model lacks.

    Args:
        gate: The gate.
        names: The model's outputs.

    Raises:
        InputError: It does.
    """
    names = list(names)
    unknown = [name for name in gate.per_output if name not in names]
    if unknown:
        raise InputError(
            f"there is a limit for output {unknown[0]!r}, which the model does not have;"
            f" its outputs are {', '.join(names)}"
        )


def judge(
    outputs: Sequence[Mapping[str, Array]],
    references: Sequence[Mapping[str, Array]],
    gate: Gate,
) -> Verdict:
    """Hold an engine's outputs against the references.

    Args:
        outputs: One mapping from output name to array for every input set.
        references: The same of the reference, in the same order. Outputs beyond its names are
            ignored.
        gate: Metric and limits.

    Returns:
        The verdict; an invalid output is reported before any loss.

    Raises:
        InputError: The gate has a limit for an output the model does not have.
    """
    names = dict.fromkeys(name for reference in references for name in reference)
    check_outputs(gate, names)
    worst: dict[str, dict[str, float]] = {name: {} for name in names}
    for index, (given, reference) in enumerate(zip(outputs, references, strict=True)):
        for name, wanted in reference.items():
            flaw = _flaw(given.get(name), wanted)
            if flaw:
                reason = f"output {name!r} {flaw} (input set {index})"
                return Verdict({}, Status.INVALID_OUTPUT, reason)
            found = losses(given[name], wanted, gate.atol, gate.rtol)
            for metric, loss in found.items():
                worst[name][metric] = max(worst[name].get(metric, loss), loss)
    kept = {metric: max(w[metric] for w in worst.values()) for metric in METRICS} if worst else {}
    if gate.per_output:
        kept |= {f"{gate.metric}:{name}": w[gate.metric] for name, w in worst.items()}
    judged = {f"output {n!r}": (w[gate.metric], gate.limit_of(n)) for n, w in worst.items()}
    return _verdict(kept, gate.metric, judged)


def _flaw(given: Array | None, wanted: Array) -> str:
    """What makes an output invalid at any limit; empty when nothing does."""
    if given is None:
        return "is missing"
    if not isinstance(given, np.ndarray):
        return f"is a {type(given).__name__}, not an array"
    if given.shape != wanted.shape:
        return f"has shape {given.shape} where the reference has {wanted.shape}"
    if given.dtype != wanted.dtype:
        return f"has type {given.dtype} where the reference has {wanted.dtype}"
    a, r = given.astype(np.float64), wanted.astype(np.float64)
    same = np.isfinite(a) | (a == r) | (np.isnan(a) & np.isnan(r))
    if not same.all():
        bad = a[~same]
        return f"holds {'NaN' if np.isnan(bad).any() else 'Inf'} in {bad.size} of {a.size} elements"
    if (np.isfinite(a) & ~np.isfinite(r)).any():
        return "is finite where the reference is not"
    return ""


def _exceeds(loss: float, limit: float) -> bool:
    # Written so that a NaN loss fails, which trtexec's `loss >= limit` lets through.
    return not (loss < limit or (limit == 0.0 and loss <= 0.0))


def _verdict(
    kept: Mapping[str, float], metric: str, judged: Mapping[str, tuple[float, float]]
) -> Verdict:
    failed = [(n, loss, limit) for n, (loss, limit) in judged.items() if _exceeds(loss, limit)]
    if not failed:
        return Verdict(kept, Status.OK)
    name, loss, limit = max(failed, key=lambda item: item[1])
    reason = f"{metric} of {name} is {loss:.3g}, the limit is {limit:.3g}"
    return Verdict(kept, Status.ACCURACY_FAILED, reason)


def regate(outcome: Outcome, gate: Gate) -> Outcome:
    """The outcome as another gate would have judged it, from the losses it carries.

    Only `OK` and `ACCURACY_FAILED` can change. An outcome that failed before and passes now may
    lack a measurement, and is not feasible then. Limits per output need each output's loss; an
    outcome without them is held, with its worst loss, to the smallest of the limits. `l0` was
    counted with the tolerances of the first gate.

    Raises:
        InputError: The outcome does not carry the loss the gate asks for.
    """
    if outcome.status not in (Status.OK, Status.ACCURACY_FAILED):
        return outcome
    if gate.metric not in outcome.losses:
        raise InputError(
            f"the outcome of route '{outcome.route}' carries no {gate.metric} loss, only"
            f" {', '.join(outcome.losses) or 'none'}; choose another metric or measure again"
        )
    prefix = f"{gate.metric}:"
    by_output = {k[len(prefix) :]: v for k, v in outcome.losses.items() if k.startswith(prefix)}
    if gate.per_output and by_output:
        judged = {f"output {n!r}": (loss, gate.limit_of(n)) for n, loss in by_output.items()}
    else:
        limit = min([gate.limit, *gate.per_output.values()])
        judged = {"the worst output": (outcome.losses[gate.metric], limit)}
    verdict = _verdict(outcome.losses, gate.metric, judged)
    if verdict.status is Status.OK and outcome.status is Status.OK:
        return outcome
    said = verdict.reason.partition(" is ")[2]
    if verdict.status is outcome.status and outcome.reason.startswith(f"{gate.metric} of "):
        if outcome.reason.endswith(said):  # the same verdict, in words that name the output
            return outcome
    return replace(outcome, status=verdict.status, reason=verdict.reason)
