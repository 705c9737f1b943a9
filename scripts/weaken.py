"""What security mutants are made of: the list, what is drawn from the code, and how a loaded module is weakened.

`mutants.py` runs them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "cloister"
LIST = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))
WRITTEN = [(m["file"], m["name"], m["old"], m["new"]) for m in LIST["mutant"]]
CHECKS, AUDIT = ("verify", "heard", "still_there"), "collective_audit.holder"  # beside all that is called check_…


@dataclass(frozen=True)
class Mutant:
    file: str  # below src/cloister, without .py
    name: str
    source: str  # the whole file, weakened

    @property
    def key(self) -> str:
        return f"{self.file.rpartition('/')[2]}: {self.name}"

    @property
    def lines(self) -> range:
        """The lines of the whole file that are weakened, counted from 1."""
        old = (PACKAGE / f"{self.file}.py").read_text(encoding="utf-8").splitlines()
        new = self.source.splitlines()
        head = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
        tail = next((i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), 0)
        return range(head + 1, max(len(old) - tail, head + 1) + 1)


# ---- mutants ---------------------------------------------------------------------------------------------------------


def drawn(file: str) -> Iterator[Mutant]:
    """One mutant per call of a check that is dropped, and per condition of an abort that never holds."""
    text = (PACKAGE / f"{file}.py").read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    seen: dict[str, int] = {}

    def named(what: str) -> str:
        seen[what] = seen.get(what, 0) + 1
        return what if seen[what] == 1 else f"{what} ({seen[what]})"

    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    for function in (f for f in functions if f.name != "cost"):
        for node in ast.walk(function):
            if isinstance(node, ast.Expr) and (called := _called(node.value)):
                yield Mutant(file, named(f"{function.name} without {called}"), _blank(lines, node, "pass"))
            elif isinstance(node, ast.If) and (code := _abort(node)):
                test = node.test
                head = lines[test.lineno - 1][: test.col_offset]
                tail = lines[(test.end_lineno or 0) - 1][test.end_col_offset :]
                changed = [*lines[: test.lineno - 1], f"{head}False{tail}", *lines[test.end_lineno :]]
                yield Mutant(file, named(f"{function.name} never aborts with '{code}'"), "".join(changed))


def _called(call: ast.expr) -> str:
    """The name of a check that is called for nothing but to raise, or to be part of one that follows."""
    call = call.value if isinstance(call, ast.Await) else call
    if not isinstance(call, ast.Call):
        return ""
    whole = ast.unparse(call.func)
    name = whole.rpartition(".")[2]
    return name if name.startswith("check") or name in CHECKS else "audit" if whole == AUDIT else ""


def _abort(node: ast.If) -> str:
    """The code of the ProtocolAbort that is all this condition is for."""
    if len(node.body) != 1 or node.orelse:
        return ""
    only = node.body[0]
    if isinstance(only, ast.Expr) and isinstance(only.value, ast.Call) and ast.unparse(only.value.func) == "reject":
        return "rejected"
    raised = only.exc if isinstance(only, ast.Raise) else None
    if not isinstance(raised, ast.Call) or ast.unparse(raised.func) != "ProtocolAbort" or len(raised.args) < 3:
        return ""
    return str(raised.args[2].value) if isinstance(raised.args[2], ast.Constant) else ""


def _blank(lines: list[str], node: ast.Expr, instead: str) -> str:
    indent = " " * node.col_offset
    return "".join([*lines[: node.lineno - 1], f"{indent}{instead}\n", *lines[node.end_lineno :]])


def written() -> Iterator[Mutant]:
    """The mutants of the list; what fits nowhere any more is said, and fails at the end (`stale`)."""
    for file, name, old, new in WRITTEN:
        path = PACKAGE / f"{file}.py"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for before, after in zip(_several(old), _several(new), strict=True):
            text = text.replace(before, after) if text.count(before) == 1 else ""
        if text:
            yield Mutant(file, name, text)


def stale() -> list[str]:
    known = {m.key for m in written()}
    return [key for file, name, *_ in WRITTEN if (key := f"{file.rpartition('/')[2]}: {name}") not in known]


def _several(text: str | list[str]) -> list[str]:
    return [text] if isinstance(text, str) else text


def all_mutants() -> list[Mutant]:
    made = [m for file in LIST["files"] if (PACKAGE / f"{file}.py").exists() for m in drawn(file)] + list(written())
    keys = [m.key for m in made]
    if twice := {k for k in keys if keys.count(k) > 1}:
        raise SystemExit(f"two mutants have one name: {sorted(twice)[0]}")
    return made


# ---- weakening what is loaded ----------------------------------------------------------------------------------------


def weaken(mutant: Mutant) -> bool:
    """Give the functions of a loaded module the code of the mutant; False if more than functions differ."""
    path = PACKAGE / f"{mutant.file}.py"
    old = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    new = compile(mutant.source, str(path), "exec", dont_inherit=True)
    before, after = _functions(old), _functions(new)
    if _does(old, inside=False) != _does(new, inside=False) or before.keys() != after.keys():
        return False
    loaded = {f.__qualname__: f for f in _loaded(importlib.import_module("cloister." + mutant.file.replace("/", ".")))}
    changed = [name for name in before if _does(before[name]) != _does(after[name])]
    if not changed or not set(changed) <= loaded.keys():
        return False
    for name in changed:
        loaded[name].__code__ = after[name]
    return True


def _does(code: CodeType, *, inside: bool = True) -> tuple[object, ...]:
    """What a piece of code does, wherever its lines are; with or without the functions in it."""
    parts = (c for c in code.co_consts if isinstance(c, CodeType) and (inside or _is_class(c)))
    plain = tuple(repr(c) for c in code.co_consts if not isinstance(c, CodeType))
    names = code.co_names, code.co_varnames, code.co_freevars
    return code.co_code, names, plain, tuple(_does(c, inside=inside) for c in parts)


def _is_class(code: CodeType) -> bool:
    return not code.co_flags & inspect.CO_OPTIMIZED


def _functions(code: CodeType) -> dict[str, CodeType]:
    """Functions of a module and methods of its classes, by qualified name; not what is inside of them."""
    found: dict[str, CodeType] = {}
    for c in code.co_consts:
        if isinstance(c, CodeType):
            found |= _functions(c) if _is_class(c) else {c.co_qualname: c}
    return found


def _loaded(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a loaded module defines, under whatever decorates them."""
    spaces = [vars(module), *(vars(c) for c in vars(module).values() if inspect.isclass(c))]
    for thing in [t for space in spaces for t in space.values()]:
        inner = getattr(thing, "fget", None) or getattr(thing, "__func__", None) or thing
        inner = inspect.unwrap(inner) if callable(inner) else inner
        if isinstance(inner, FunctionType) and inner.__module__ == module.__name__:
            yield inner


def functions_of(mutant: Mutant) -> set[str]:
    """The functions in which a mutant differs, as `reached` notes them; none if it differs elsewhere too."""
    path = PACKAGE / f"{mutant.file}.py"
    before, after = (_functions(compile(t, "-", "exec")) for t in (path.read_text(encoding="utf-8"), mutant.source))
    return {f"{mutant.file}: {n}" for n in before if n not in after or _does(before[n]) != _does(after[n])}


# ---- noticing what runs ----------------------------------------------------------------------------------------------


def listen(files: list[str], heard: Callable[[str], None]) -> None:
    """Have every function of these files say its name when it is called, as `functions_of` has it."""
    for file in files:
        module = importlib.import_module("cloister." + file.replace("/", "."))
        path = PACKAGE / f"{file}.py"
        tree = _Listening(file).visit(ast.parse(path.read_text(encoding="utf-8")))
        code = _functions(compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True))
        vars(module)["__heard__"] = heard
        for function in _loaded(module):
            if function.__qualname__ in code:
                function.__code__ = code[function.__qualname__]


class _Listening(ast.NodeTransformer):
    """Puts `__heard__(name)` first into every function of a module and every method of its classes."""

    def __init__(self, file: str, above: str = "") -> None:
        self.file, self.above = file, above

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        inner = _Listening(self.file, f"{self.above}{node.name}.")
        node.body = [inner.visit(n) for n in node.body]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        says = ast.parse(f"__heard__({f'{self.file}: {self.above}{node.name}'!r})").body
        node.body = [*says, *node.body]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]
