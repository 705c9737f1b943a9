"""The test kit: `check_protocol` asks every protocol file the same five questions, and `check_lies` a sixth.

1. *ideal*: what the roles return equals `ideal()`, for every case.
2. *vectors*: with fixed entropy, the transcript equals the stored one; every stored `bad_*` fault aborts by its code.
3. *view*: names, order and sizes of the messages are the same for any two inputs under the same `Params`.
4. *abort*: drop, delay, swap, duplicate or truncate any message, or kill a party at any line, and every party stops
   in time, naming the line; or finishes with the right result, where the protocol survives that.
5. *cost*: messages and bytes are what `cost()` says, up to framing.
6. *lies*: one party, whichever, is malicious in one message, whichever, or in its inputs; all others end with a right
   result or a named abort, and whether a message makes them abort does not depend on their inputs.

A protocol module offers `Params`, `ideal(params, inputs)`, `roles(params)` (party → coroutine function; the first
party is the coordinator) and `cost(params)`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cloister.errors import CloisterError, ProtocolAbort
from cloister.mpc.crypto.agreement import bind, hkdf
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.memory_transport import Fault, Killed
from cloister.mpc.net.receipts import Entry
from cloister.mpc.parties import Agreement, Party
from cloister.mpc.simulation import Simulation, agreement_of, simulate
from cloister.mpc.sums import common_seed
from cloister.mpc.testing.lies import INPUTS, LETTERS, Lie, Stage, all_lies, one_of_each, scaled

FRAMING = 400  # bytes of header and field names that one message may add to its payload


@dataclass(frozen=True)
class Case:
    """Public parameters and every party's private inputs, in the order the role takes them."""

    params: Any
    inputs: Mapping[Party, tuple[Any, ...]]


def name_of(module: Any) -> str:
    """What a protocol is called on the wire: its `PROTOCOL`, or else its file's name."""
    return str(getattr(module, "PROTOCOL", "") or str(module.__name__).rpartition(".")[2])


def dealt_seeds(sites: Sequence[Party], secret: bytes = bytes(range(32))) -> dict[Party, common_seed.Seed]:
    """What `common_seed` would give to each site, from one place: for tests of protocols that begin after it."""
    pairs = {
        u: {v: hkdf(secret, bind("dealt", *(w.encode() for w in sorted((u, v))))) for v in sites if v != u}
        for u in sites
    }
    return {u: common_seed.Seed(secret, tuple(sites), pairs[u]) for u in sites}


def fixed_entropy(seed: str) -> Callable[[Party], Entropy]:
    """Entropy that repeats: only for vectors, and only here."""

    def of(party: Party) -> Entropy:
        state = {"at": 0}

        def draw(n: int) -> bytes:
            state["at"] += 1
            return hashlib.shake_256(f"{seed}/{party}/{state['at']}".encode()).digest(n)

        return Entropy(draw)

    return of


class Everything(frozenset[str]):
    """The consent of a party of a test: whatever it is asked for."""

    def __contains__(self, what: object) -> bool:
        return True


def run_protocol(
    module: Any,
    case: Case,
    *,
    faults: Iterable[Fault] = (),
    timeout: float = 30.0,
    colluders: int = 0,
    entropy: Callable[[Party], Entropy] | None = None,
    roles: Mapping[Party, Any] | None = None,
) -> Simulation:
    """Play the roles of a protocol in memory. `run.values[party]` is what a role returned; all parties consent."""
    chosen = {**module.roles(case.params), **(roles or {})}
    agreement = agreement_of(chosen, timeout=timeout, colluders=colluders)

    def agreed(before: Agreement, keys: Mapping[Party, bytes]) -> Agreement:
        return replace(before, keys=dict(keys), digest=_digest(name_of(module), before, keys))

    return simulate(
        module,
        case.params,
        case.inputs,
        roles=roles,
        agreement=agreement,
        with_keys=agreed,
        faults=faults,
        entropy=entropy,
        consent=dict.fromkeys(chosen, Everything()),
    )


def _digest(name: str, agreement: Agreement, keys: Mapping[Party, bytes]) -> bytes:
    """That of a study of this protocol alone, under which the stored vectors were made."""
    plain = {
        "name": "test",
        "parties": dict(agreement.parties),
        "seed": 0,
        "timeout": float(agreement.timeout),
        "patience": float(agreement.patience),
        "keys": {p: k.hex() for p, k in keys.items()},
        **({"colluders": agreement.colluders} if agreement.colluders else {}),
        "workflow": f"cloister.protocols.{name}",
        "mode": "hardened",
        "parameters": {},
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).digest()


def transcript(run: Simulation, *, hashes: bool = False) -> dict[str, list[Any]]:
    """What each party sent: names, recipients and sizes, in order; with `hashes`, the bytes too."""

    def row(e: Entry) -> list[Any]:
        return [e.name, e.to, e.bytes, *([e.sha256] if hashes else [])]

    return {p: [row(e) for e, _ in r.entries if e.kind == "sent"] for p, r in sorted(run.receipts.items())}


def values(run: Simulation) -> dict[Party, Any]:
    return run.values


def check_ideal(
    module: Any, cases: Iterable[Case], *, agree: Callable[[Any, Any], None], timeout: float = 30.0
) -> None:
    """1: the roles return what a trusted party would hand out; `agree(found, ideal)` raises if not."""
    for case in cases:
        run = run_protocol(module, case, timeout=timeout)
        check_no_errors(run)
        wanted = module.ideal(case.params, plain_inputs(case))
        for party, value in values(run).items():
            agree(value, wanted.get(party))


def plain_inputs(case: Case) -> dict[Party, Any]:
    return {p: x[0] if len(x) == 1 else x for p, x in case.inputs.items()}


def check_no_errors(run: Simulation) -> None:
    for party, e in run.errors.items():
        raise AssertionError(f"'{party}' failed: {type(e).__name__}: {e}") from e


def check_vectors(module: Any, case: Case, path: Path, *, write: bool = False, timeout: float = 2.0) -> None:
    """2: the same entropy gives the same bytes as ever, and every stored fault still aborts with its code."""
    run = run_protocol(module, case, entropy=fixed_entropy("vectors"))
    check_no_errors(run)
    found = transcript(run, hashes=True)
    if write or not path.exists():
        raise_if_missing = not write
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({"transcript": found, "bad": old.get("bad", [])}, indent=1) + "\n")
        if raise_if_missing:
            raise AssertionError(f"{path} was missing; written now, look at it and commit it")
    stored = json.loads(path.read_text())
    assert found == stored["transcript"], f"{module.__name__} sends other bytes than {path} says"
    for bad in stored["bad"]:
        fault = Fault(**bad["fault"])
        ended = run_protocol(module, case, faults=[fault], timeout=timeout, entropy=fixed_entropy("vectors"))
        codes = {e.code for e in ended.errors.values() if isinstance(e, ProtocolAbort)}
        assert bad["code"] in codes, f"{bad}: aborted with {sorted(codes) or 'nothing'}"


def check_view(module: Any, first: Case, second: Case) -> None:
    """3: two inputs under the same parameters look the same from outside."""
    assert first.params == second.params
    one, two = run_protocol(module, first), run_protocol(module, second)
    check_no_errors(one)
    check_no_errors(two)
    assert transcript(one) == transcript(two), "names, order or sizes of messages depend on the inputs"


def check_abort(
    module: Any,
    case: Case,
    *,
    survived: Callable[[Simulation], None],
    kinds: Sequence[str] = ("drop", "delay", "duplicate", "swap", "truncate", "kill"),
    timeout: float = 0.6,
    within: float = 60.0,
    messages: Iterable[tuple[str, str, str]] | None = None,
) -> int:
    """4: do each thing to each message; returns how many runs that were.

    `survived(run)` raises unless a run in which the coordinator finished has the right result.
    """
    clean = run_protocol(module, case)
    check_no_errors(clean)
    sent = {(p, to, name) for p, rows in transcript(clean).items() for name, to, _ in rows}
    count = 0
    hub = next(iter(module.roles(case.params)))
    for sender, to, name in sorted(messages or sent):
        for kind in kinds:
            fault = Fault(kind, sender, to, name, seconds=timeout / 4)  # type: ignore[arg-type]
            began = time.monotonic()
            run = run_protocol(module, case, faults=[fault], timeout=timeout)
            took = time.monotonic() - began
            assert took < within, f"{fault}: took {took:.1f} s"
            for party, e in run.errors.items():
                assert isinstance(e, CloisterError), f"{fault}: '{party}' raised {type(e).__name__}: {e}"
                if isinstance(e, ProtocolAbort):
                    assert all((e.protocol, e.line, e.code)), f"{fault}: '{party}' does not say where it stopped"
            if hub in run.outcomes:
                survived(run)
            else:
                assert run.errors or kind == "kill", f"{fault}: nobody noticed"
            count += 1
    return count


def check_cost(module: Any, case: Case) -> None:
    """5: every party sends as many messages and bytes as the file says."""
    run = run_protocol(module, case)
    check_no_errors(run)
    for party, (messages, payload) in module.cost(case.params).items():
        rows = [r for r in transcript(run)[party] if not r[0].startswith("channel.")]
        total = sum(size for _, _, size in rows)
        assert len(rows) == messages, f"'{party}' sent {len(rows)} messages, cost() says {messages}"
        slack = FRAMING * messages + 0.02 * payload
        assert payload <= total <= payload + slack, f"'{party}' sent {total} bytes, cost() says {payload}"


@dataclass(frozen=True)
class Lies:
    """What became of them."""

    tried: int
    aborted: int  # some honest party stopped by name
    right: int  # all honest parties had a right result
    assumed: int  # of a kind that the protocol says under Assumes not to withstand


def check_lies(
    module: Any,
    cases: Sequence[Case],
    *,
    right: Callable[[Lie, dict[Party, Any]], None],
    assumes: Mapping[str, str] | None = None,
    liars: Iterable[Party] | None = None,
    full: bool = False,
    timeout: float = 2.0,
    within: float = 60.0,
    only: Callable[[Lie], bool] = lambda lie: True,
    scale: Callable[[Any, int], Any] = scaled,
) -> Lies:
    """6: a party of every role is malicious, one message or one input at a time; returns how often who noticed.

    Parameters
    ----------
    cases
        The first is played; a second with the same parameters and other inputs, if there is one, has to end the same
        way under the same lie.
    right
        `right(lie, values)` raises unless what the honest parties that finished returned is `ideal()` of *some* input
        of the liar; with (j), of its inputs in `lie.case`, which is the case that was run.
    assumes
        Role function → letters of its lies that may give wrong results: `{"coordinator": "ab"}`. The docstring's
        *Assumes* has to say so, as "(a), (b) of the coordinator". They must still end in time and without a crash.
    liars
        Who lies; by default one party per role function.
    full
        Every lie, instead of one per kind of message.
    scale
        `scale(message, factor)` for (g), where a tag is not linear in the words it travels in.
    """
    case, assumes = cases[0], assumes or {}
    for role, letters in assumes.items():
        wanted = f"{', '.join(f'({x})' for x in letters)} of the {role}"
        text = " ".join((module.__doc__ or "").split())
        assert wanted in text, f"{module.__name__} does not say under Assumes: {wanted}"
    roles = module.roles(case.params)
    by_role: dict[Any, Party] = {}
    for party, role in roles.items():
        by_role.setdefault(role, party)
    chosen = {p: roles[p] for p in (liars or by_role.values())}
    clean = Stage()
    check_no_errors(_staged(module, case, clean, 30.0))
    every = all_lies(clean.said, chosen, case.inputs, clean.contributed)
    lies = [lie for lie in every if only(lie)]
    tried = aborted = fine = assumed = 0
    for lie in lies if full else list(one_of_each(iter(lies))):
        played = [with_other_inputs(c, lie) if lie.letter == "j" else c for c in cases[:2]]
        if any(c is None for c in played):
            continue  # there is no such input
        ends = [_one_lie(module, c, lie, Stage(lie, clean.said, scale), timeout, within) for c in played if c]
        if any(end is None for end in ends):
            continue  # in this run there was nothing to change
        tried += 1
        stopped = [end[1] for end in ends if end is not None]
        if lie.general in assumes.get(getattr(chosen[lie.liar], "__name__", ""), ""):
            assumed += 1
            continue
        if lie.letter != "j":  # other inputs change what is opened, and aborts may follow from that
            assert len(set(stopped)) == 1, f"{lie}: whether the others abort depends on their inputs"
        for end, c in zip(ends, played, strict=True):
            assert end is not None
            right(replace(lie, case=c), end[0])
        aborted, fine = aborted + stopped[0], fine + (not stopped[0])
    return Lies(tried, aborted, fine, assumed)


def _staged(module: Any, case: Case, stage: Stage, timeout: float) -> Simulation:
    roles = {p: stage.role(p, role) for p, role in module.roles(case.params).items()}
    return run_protocol(module, case, roles=roles, timeout=timeout)


def with_other_inputs(case: Case, lie: Lie) -> Case | None:
    """(j): the malicious party's numbers times a factor; None where no input has such numbers."""
    mine, factor = case.inputs[lie.liar], list(INPUTS.values())[lie.way]
    try:
        other = tuple(scaled(x, factor, counts=True) for x in mine)
    except (CloisterError, OverflowError):
        return None
    if all(a is b for a, b in zip(mine, other, strict=True)):
        return None
    return Case(case.params, {**case.inputs, lie.liar: other})


def _one_lie(
    module: Any, case: Case, lie: Lie, stage: Stage, timeout: float, within: float
) -> tuple[dict[Party, Any], bool] | None:
    """What the honest parties returned, and whether one of them stopped; None if there was nothing to lie about."""
    began = time.monotonic()
    run = _staged(module, case, stage, timeout)
    took = time.monotonic() - began
    assert took < within, f"{lie}: took {took:.1f} s"
    if not stage.lied:
        return None
    honest = {p: e for p, e in run.errors.items() if p != lie.liar}
    for party, e in honest.items():
        assert isinstance(e, ProtocolAbort), f"{lie}: '{party}' raised {type(e).__name__}: {e}"
        assert all((e.protocol, e.line, e.code)), f"{lie}: '{party}' does not say where it stopped"
    return {p: v for p, v in values(run).items() if p != lie.liar}, bool(honest)


def check_protocol(
    module: Any,
    cases: Sequence[Case],
    *,
    vectors: Path,
    agree: Callable[[Any, Any], None],
    survived: Callable[[Simulation], None],
    twin: Case,
    abort_messages: Iterable[tuple[str, str, str]] | None = None,
) -> None:
    """All five questions. `cases[0]` is small and used for the last four; `twin` has its params and other inputs."""
    check_ideal(module, cases, agree=agree)
    check_vectors(module, cases[0], vectors)
    check_view(module, cases[0], twin)
    check_abort(module, cases[0], survived=survived, messages=abort_messages)
    check_cost(module, cases[0])


def same_array(found: Any, ideal: Any) -> None:
    """Agreement for roles that return an array, or nothing."""
    if ideal is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, ideal)


__all__ = [
    "LETTERS",
    "Case",
    "Fault",
    "Killed",
    "Lie",
    "Lies",
    "check_lies",
    "check_protocol",
    "fixed_entropy",
    "run_protocol",
    "same_array",
    "values",
]
