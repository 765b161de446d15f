"""Sites: places in a source where one small break can be put, and the source with it.

Only lines that ran are of interest: a break in a line that no load reaches says nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from attrs import frozen

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@frozen
class Site:
    """A place: the `index`th of `source`'s tree in walking order, and how it is broken there."""

    line: int
    index: int
    kind: str
    text: str


def sites(source: str, lines: Collection[int]) -> list[Site]:
    """The places inside of functions that stand on one of `lines`."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for statement in function.body
        for node in ast.walk(statement)
    }
    return [
        Site(line, index, kind, ast.unparse(node).splitlines()[0][:90])
        for index, node in enumerate(ast.walk(tree))
        if id(node) in inside and (line := getattr(node, "lineno", 0)) in lines
        for kind in _kinds(node)
    ]


def _kinds(node: ast.AST) -> tuple[str, ...]:
    match node:
        case ast.Compare() if type(node.ops[0]) in _COMPARED:
            return ("compared the other way",)
        case ast.BinOp() if type(node.op) in _COMPUTED:
            return ("computed another way",)
        case ast.Constant() if type(node.value) is int:
            return ("one more",)
        case ast.BoolOp():
            return ("and for or",)
        case ast.If():
            return ("always", "never")
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            return ("left out",)
        case ast.Assign() if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            return ("left out",)
    return ()


def broken(source: str, site: Site) -> str:
    """The source with that place broken; without its comments."""
    tree = ast.parse(source)
    for index, node in enumerate(ast.walk(tree)):
        if index == site.index:
            _Broken(node, site.kind).visit(tree)  # in place: no site is the module itself
            break
    return ast.unparse(ast.fix_missing_locations(tree))


class _Broken(ast.NodeTransformer):
    def __init__(self, place: ast.AST, kind: str) -> None:
        self._place = place
        self._kind = kind

    def visit(self, node: ast.AST) -> ast.AST:
        """The tree below a node, with the one place broken."""
        if node is not self._place:
            return self.generic_visit(node)
        if self._kind == "left out":
            return ast.Pass()
        match node:
            case ast.Compare():
                node.ops[0] = _COMPARED[type(node.ops[0])]()
            case ast.BinOp():
                node.op = _COMPUTED[type(node.op)]()
            case ast.Constant():
                assert isinstance(node.value, int)
                node.value += 1
            case ast.BoolOp():
                node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            case ast.If():
                node.test = ast.Constant(self._kind == "always")
        return node
