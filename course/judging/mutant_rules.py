"""Mistakes by rule: the mutants of a function, as spans of its source with another text.

The rules are those of mutation testing in general (comparisons and their edges, arithmetic, boolean
operators, constants, defaults, slices, keywords, statements left out or swapped), and names that
stand beside each other in an inference engine and are easily taken for one another.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from course.building.syntax import Function, parts, work
from course.workbooks import stubs


@dataclass(frozen=True)
class Mutant:
    """One wrong version of a definition: between `start` and `end` of its file stands `new`."""

    path: str  # such as minisgl/core.py; "" for a function of the notebook itself
    name: str  # dotted: Req.complete_one
    line: int
    start: int  # offsets into the text of the file
    end: int
    old: str
    new: str
    number: int = 0  # among those of this definition that change the same text in the same way

    @property
    def key(self) -> str:
        """What it is called in the list of equivalent mutants; the line may move."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.path or 'notebook'}:{self.name}: {old} → {new or 'nothing'}{again}"

    def apply(self, text: str) -> str:
        """The file with the mutant in it."""
        return text[: self.start] + self.new + text[self.end :]


Edit = tuple[ast.AST | tuple[int, int], str]  # what is replaced, and by what

COMPARISONS: dict[type[ast.cmpop], list[str]] = {
    ast.Lt: ["<=", ">="],
    ast.LtE: ["<", ">"],
    ast.Gt: [">=", "<="],
    ast.GtE: [">", "<"],
    ast.Eq: ["!="],
    ast.NotEq: ["=="],
    ast.Is: ["is not"],
    ast.IsNot: ["is"],
    ast.In: ["not in"],
    ast.NotIn: ["in"],
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.MatMult: "*",
}
# Names that stand beside each other in this code, and are easily taken for one another.
NEIGHBORS = [
    ["reqs", "padded_reqs"],
    ["size", "padded_size"],
    ["cached_len", "device_len", "extend_len"],
    ["remain_len", "extend_len"],
    ["max_device_len", "device_len"],
    ["total_size", "available_size", "evictable_size", "protected_size"],
    ["num_qo_heads", "num_kv_heads"],
    ["cu_seqlens_q", "cu_seqlens_k"],
    ["max_seqlen_q", "max_seqlen_k"],
    ["q_lens", "kv_lens"],
    ["num_pages", "page_size"],
    ["input_ids", "positions", "out_loc"],
    ["is_prefill", "is_decode"],
    ["temperature", "top_p"],
    ["rank", "size"],
    ["k", "v"],
    ["cos", "sin"],
    ["q", "k"],
    ["hidden_size", "intermediate_size"],
    ["min", "max"],
    ["any", "all"],
    ["zeros", "ones"],
    ["next_tokens_cpu", "next_tokens_gpu"],
    ["float32", "bfloat16"],
    ["int32", "int64"],
    ["argmax", "argmin"],
    ["div_ceil", "div_even"],
    ["align_ceil", "align_down"],
]
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign)


def mutants_of(text: str, path: str, names: Sequence[str]) -> list[Mutant]:
    """The mutants of the functions `names` of a file, in the order of its lines."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    lines = text.split("\n")

    def offset(line: int, column: int) -> int:  # ast counts columns in bytes
        raw = lines[line - 1].encode("utf-8")[:column]
        return starts[line - 1] + len(raw.decode("utf-8"))

    def span(where: ast.AST | tuple[int, int]) -> tuple[int, int]:
        if isinstance(where, tuple):
            return where
        n: Any = where
        return offset(n.lineno, n.col_offset), offset(n.end_lineno, n.end_col_offset)

    found: dict[tuple[int, int, str], Mutant] = {}
    counts: dict[str, int] = {}
    for part in parts(text):
        if part.name not in names or not stubs.is_open(part.node):
            continue
        for where, new in _edits(part.node, text, span):
            start, end = span(where)
            mutant = Mutant(
                path, part.name, text.count("\n", 0, start) + 1, start, end, text[start:end], new
            )
            if (start, end, new) in found or text[start:end] == new:
                continue
            try:
                compile(mutant.apply(text), path or "notebook", "exec")
            except SyntaxError:
                continue
            number = counts.get(mutant.key, 0)
            counts[mutant.key] = number + 1
            found[start, end, new] = Mutant(**{**asdict(mutant), "number": number})
    return sorted(found.values(), key=lambda m: (m.start, m.end, m.new))


def _edits(function: Function, text: str, span: Callable[[Any], tuple[int, int]]) -> Iterator[Edit]:
    """Every change that a rule makes to one function."""

    def source(node: ast.AST) -> str:
        start, end = span(node)
        return text[start:end]

    for default in [*function.args.defaults, *(d for d in function.args.kw_defaults if d)]:
        yield from _of_expression(default, source, span, text)
    body = work(function)
    yield from _of_statements(body, source, span)
    for statement in body:
        for node in _inside(statement):
            if isinstance(node, ast.expr):
                yield from _of_expression(node, source, span, text)
            elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
                target, value = span(node.target)[1], span(node.value)[0]
                symbol = ARITHMETIC[type(node.op)]
                yield (target, value), f" {symbol}= "
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    yield from _of_statements(block, source, span)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and what is in it, but for texts, annotations, and what an error says."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or (isinstance(node, ast.Raise)):
            continue
        if isinstance(node, ast.Assert) and name == "msg":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from _inside(child)


def _of_expression(
    node: ast.expr,
    source: Callable[[ast.AST], str],
    span: Callable[[Any], tuple[int, int]],
    text: str,
) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        before = node.left
        for op, after in zip(node.ops, node.comparators, strict=True):
            between = (span(before)[1], span(after)[0])
            gap = text[between[0] : between[1]]
            for other in COMPARISONS[type(op)]:
                symbol = re.search(r"[<>=!]+|not\s+in|is\s+not|in|is", gap)
                if symbol:
                    yield between, gap[: symbol.start()] + other + gap[symbol.end() :]
            before = after
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield node, f"{source(node.left)} {ARITHMETIC[type(node.op)]} {source(node.right)}"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({word.join(f'({source(value)})' for value in node.values)})"
        for value in node.values:  # one of the conditions forgotten
            rest = [f"({source(v)})" for v in node.values if v is not value]
            yield node, (" and " if isinstance(node.op, ast.And) else " or ").join(rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node, source(node.operand)
    elif isinstance(node, ast.IfExp):
        yield node, source(node.body)
        yield node, source(node.orelse)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node.value, int | float):
            yield node, repr(node.value + 1)
            yield node, repr(node.value - 1)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        yield from _of_slice(node.slice, source)
    elif isinstance(node, ast.Call):
        yield from _of_call(node, source, span)
    elif isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if isinstance(node.ctx, ast.Load):
            end = span(node)[1]
            for group in NEIGHBORS:
                for other in group if name in group else ():
                    if other != name:
                        yield (end - len(name), end), other


def _of_slice(node: ast.Slice, source: Callable[[ast.AST], str]) -> Iterator[Edit]:
    for bound in (node.lower, node.upper):
        if bound is not None:
            yield bound, ""
            if not isinstance(bound, ast.Constant):
                yield bound, f"{source(bound)} + 1"
                yield bound, f"{source(bound)} - 1"


def _of_call(
    node: ast.Call, source: Callable[[ast.AST], str], span: Callable[[Any], tuple[int, int]]
) -> Iterator[Edit]:
    args = node.args
    for left, right in pairwise(args):
        if not any(isinstance(a, ast.Starred) or _is_text(a) for a in (left, right)):
            yield (span(left)[0], span(right)[1]), f"{source(right)}, {source(left)}"
    parts = [source(a) for a in args]
    words = [f"**{source(k.value)}" if k.arg is None else source(k) for k in node.keywords]
    for dropped, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            rest = [word for i, word in enumerate(words) if i != dropped]
            yield node, f"{source(node.func)}({', '.join([*parts, *rest])})"
    method = node.func
    if isinstance(method, ast.Attribute) and not args and not node.keywords:
        yield node, source(method.value)  # x.contiguous() → x


def _is_text(node: ast.expr) -> bool:
    """Whether it is words for a person: no rule changes those."""
    is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_string or isinstance(node, ast.JoinedStr)


def _of_statements(
    body: list[ast.stmt],
    source: Callable[[ast.AST], str],
    span: Callable[[Any], tuple[int, int]],
) -> Iterator[Edit]:
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        changes = isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Raise)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            changes = any(isinstance(t, ast.Attribute | ast.Subscript) for t in targets)
        if changes:
            yield node, "pass"
        if isinstance(node, ast.If):
            yield node.test, "True"
            yield node.test, "False"
        if isinstance(node, ast.With) and len(node.items) == 1:
            yield node.items[0].context_expr, "__import__('contextlib').nullcontext()"
    for first, second in pairwise(body):
        if isinstance(first, SIMPLE) and isinstance(second, SIMPLE):
            start, end = span(first)[0], span(second)[1]
            indent = " " * first.col_offset
            yield (start, end), f"{source(second)}\n{indent}{source(first)}"
