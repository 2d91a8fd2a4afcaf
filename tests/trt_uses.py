"""What `engines/trt*.py` use of TensorRT's module, held against a module.

TensorRT's wheels have no type stubs, so mypy sees `Any`. Here the types of what comes out of the module are
followed through our source instead: a call's or property's type is in the docstring that pybind11 writes.
Every attribute of such a value must exist, every argument must be one that the signature has, and whatever
is set must be settable. A value whose type cannot be told is a fault, and so is an `Any` of our own that is
not in the tables below: nothing goes unchecked.
"""

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "engines"

MODULE = "MODULE"
UNKNOWN = "UNKNOWN"

PARAMETERS = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "engine": "ICudaEngine",
    "module": MODULE,
    "severity": "ILogger.Severity",
    "shape": "Dims",
    "tensor": "ITensor",
    "tensors": "list[ITensor]",
    "trt": MODULE,
}
"""Types of parameters that are annotated as Any or a list of it."""
ATTRIBUTES = {
    "_context": "IExecutionContext",
    "_dims": "list[Dims]",
    "_module": MODULE,
    "engine": "ICudaEngine",
    "logger": "ILogger",
    "module": MODULE,
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
}
"""Types of our objects' attributes that hold something of the module's."""
RETURNS = {
    "_deserialize": "ICudaEngine",
    "_make_logger": "ILogger",
    "cache_dims": "Dims",
    "make_monitor": "IProgressMonitor",
    "make_profile": "IOptimizationProfile",
}
"""Types that our functions return as Any."""
BY_NAME = {
    "ComputeCapability": ("SM75", "SM80", "SM86", "SM89", "SM120"),
    "DataType": ("FLOAT", "HALF", "BF16", "INT32", "INT64", "BOOL"),
    "TensorIOMode": ("INPUT", "OUTPUT"),
}
"""Members that are asked for by a computed name, by enumeration."""
ONLY_IN_RTX = {"ComputeCapability", "num_compute_capabilities", "set_compute_capability"} | {
    "CudaGraphStrategy",
    "DynamicShapesKernelSpecializationStrategy",
    "create_runtime_config",
    "cuda_graph_strategy",
}
"""Names that are used with tensorrt_rtx alone."""
UNDOCUMENTED = {"OnnxParser.get_error": "ParserError"}
"""Types that a docstring does not say in Python's terms."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of a signature's."""

    name: str
    has_default: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What was found in some source."""

    faults: list[str]
    """What is used that is not there, and what could not be told."""
    num_uses: int
    """Attributes and calls that were checked."""


def check_engines(module: Any) -> Report:
    """Hold what our source uses of a module against it."""
    reports = [check(module, path.read_text(), path.name) for path in sorted(FOLDER.glob("trt*.py"))]
    return Report(
        [fault for report in reports for fault in report.faults], sum(report.num_uses for report in reports)
    )


def check(module: Any, source: str, name: str = "source") -> Report:
    """Hold what some source uses of a module against it."""
    follower = _Follower(module, name)
    follower.follow(ast.parse(source))
    return Report(follower.faults, follower.num_uses)


def signatures(callable_: Any) -> list[tuple[list[Parameter], str]]:
    """Read the parameters, without self, and the type returned of each overload, from the docstring."""
    found = []
    for line in (callable_.__doc__ or "").splitlines():
        match = re.match(r"(?:\d+\. )?\w*\((.*)\) -> (.+)$", line.strip())
        if match and not match[1].startswith("*args"):
            parameters = [_parameter(part) for part in _split(match[1])]
            is_method = bool(parameters) and parameters[0].name in ("self", "arg0")
            found.append((parameters[1:] if is_method else parameters, _type_name(match[2])))
    return found


def _split(text: str) -> list[str]:
    """Split at commas that are in no bracket."""
    parts, depth, last = [], 0, ""
    for letter in text:
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and depth == 0:
            parts.append(last)
            last = ""
        else:
            last += letter
    return [part.strip() for part in [*parts, last] if part.strip()]


def _parameter(text: str) -> Parameter:
    return Parameter(re.split(r"[:=]", text, maxsplit=1)[0].strip(), "=" in text)


def _type_name(text: str) -> str:
    """Shorten a type as pybind11 writes it: the class without its module."""
    return re.sub(r"\b(?:\w+\.)*tensorrt(?:_rtx)?\.", "", text.strip())


class _Follower:
    """Follows the module's values through one file."""

    def __init__(self, module: Any, name: str) -> None:
        self._module = module
        self._name = name
        self._is_rtx = module.__name__.startswith("tensorrt_rtx")
        self.faults: list[str] = []
        self.num_uses = 0

    def follow(self, tree: ast.Module) -> None:
        """Go through the file."""
        self._body(tree.body, {})

    def _fault(self, node: ast.AST, text: str) -> None:
        self.faults.append(f"{self._name}:{getattr(node, 'lineno', '?')}: {text}")

    # Statements.

    def _body(self, body: list[ast.stmt], env: dict[str, str | None]) -> None:
        for statement in body:
            self._statement(statement, env)

    def _statement(self, node: ast.stmt, env: dict[str, str | None]) -> None:
        match node:
            case ast.FunctionDef():
                self._function(node, env)
            case ast.ClassDef():
                self._class(node, env)
            case ast.Assign():
                kind = self._type(node.value, env)
                for target in node.targets:
                    self._bind(target, kind, env)
            case ast.AnnAssign():
                kind = self._type(node.value, env) if node.value is not None else None
                is_field = isinstance(node.target, ast.Attribute) or node.value is None
                name = ast.unparse(node.target).rpartition(".")[2]
                if _is_any(node.annotation) and is_field and name not in ATTRIBUTES:
                    self._fault(node, f"{name} is Any: say in ATTRIBUTES what it is")
                if isinstance(node.target, ast.Name):
                    env[name] = UNKNOWN if kind is None and _is_any(node.annotation) else kind
            case ast.For():
                self._bind(node.target, _element(self._type(node.iter, env)), env)
                self._body([*node.body, *node.orelse], env)
            case ast.Return() if node.value is not None:
                kind = self._type(node.value, env)
                if kind is not None and kind != UNKNOWN and (function := env.get("return name")):
                    declared = RETURNS.get(function)
                    if env.get("return annotation") == "Any" and declared is None:
                        self._fault(node, f"{function} returns a {kind}: say so in RETURNS")
            case _:
                for part, value in ast.iter_fields(node):
                    if part in ("body", "orelse", "finalbody"):
                        self._body(value, env)
                    elif part == "handlers":
                        for handler in value:
                            self._body(handler.body, env)
                    elif part == "items":
                        for item in value:
                            self._type(item.context_expr, env)
                    elif isinstance(value, ast.expr):
                        self._type(value, env)
                    elif isinstance(value, list):
                        for item in value:
                            if isinstance(item, ast.expr):
                                self._type(item, env)

    def _function(self, node: ast.FunctionDef, env: dict[str, str | None]) -> None:
        inner = dict(env)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            inner[argument.arg] = None
            if _is_any(argument.annotation):
                if argument.arg not in PARAMETERS:
                    self._fault(argument, f"{argument.arg} is Any: say in PARAMETERS what it is")
                inner[argument.arg] = PARAMETERS.get(argument.arg, UNKNOWN)
        inner["return name"] = node.name
        inner["return annotation"] = ast.unparse(node.returns) if node.returns else ""
        if _is_any(node.returns) and node.name not in RETURNS:
            self._fault(node, f"{node.name} returns Any: say in RETURNS what it is")
        self._body(node.body, inner)

    def _class(self, node: ast.ClassDef, env: dict[str, str | None]) -> None:
        for base in node.bases:
            kind = self._type(base, env)
            if kind is not None and kind.startswith("class:"):
                self._overrides(node, kind.removeprefix("class:"))
        self._body(node.body, dict(env))

    def _overrides(self, node: ast.ClassDef, base: str) -> None:
        """What we override must be there to be called, with arguments of these names."""
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
                original = self._attribute(method, base, method.name)
                if original is None:
                    continue
                names = [argument.arg for argument in method.args.args[1:]]
                known = [[p.name for p in parameters] for parameters, _ in signatures(original)]
                if names not in known:
                    self._fault(method, f"{base}.{method.name} takes {known}, not {names}")

    def _bind(self, target: ast.expr, kind: str | None, env: dict[str, str | None]) -> None:
        match target:
            case ast.Name():
                env[target.id] = kind
            case ast.Tuple() | ast.List():
                for part in target.elts:
                    self._bind(part, None if kind is None else UNKNOWN, env)
            case ast.Attribute():
                owner = self._type(target.value, env)
                if owner is not None:
                    descriptor = self._attribute(target, owner, target.attr)
                    if descriptor is not None and getattr(descriptor, "fset", None) is None:
                        self._fault(target, f"{owner}.{target.attr} cannot be set")
                elif kind is not None and ATTRIBUTES.get(target.attr) != kind:
                    self._fault(target, f"{ast.unparse(target)} is a {kind}: say so in ATTRIBUTES")
            case ast.Subscript():
                self._type(target, env)

    # Expressions.

    def _type(self, node: ast.expr, env: dict[str, str | None]) -> str | None:
        """Tell what of the module's an expression is; None if it is nothing of it."""
        match node:
            case ast.Name():
                return env.get(node.id)
            case ast.Attribute():
                return self._attribute_type(node, env)
            case ast.Call():
                return self._call(node, env)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                kind = self._type(node.elt, self._comprehension(node.generators, env))
                return None if kind is None else f"list[{kind}]"
            case ast.DictComp():
                inner = self._comprehension(node.generators, env)
                return UNKNOWN if self._types([node.key, node.value], inner) else None
            case ast.List() | ast.Tuple() | ast.Set():
                kinds = self._types(node.elts, env)
                return f"list[{kinds.pop()}]" if len(kinds) == 1 else UNKNOWN if kinds else None
            case ast.Dict():
                return UNKNOWN if self._types([*filter(None, node.keys), *node.values], env) else None
            case ast.Subscript():
                self._type(node.slice, env)
                return _element(self._type(node.value, env))
            case ast.IfExp():
                self._type(node.test, env)
                kinds = self._types([node.body, node.orelse], env)
                return kinds.pop() if len(kinds) == 1 else UNKNOWN if kinds else None
            case ast.NamedExpr():
                kind = self._type(node.value, env)
                self._bind(node.target, kind, env)
                return kind
            case ast.Starred():
                return self._type(node.value, env)
            case _:
                parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
                self._types(parts, env)
                return None

    def _types(self, nodes: list[ast.expr], env: dict[str, str | None]) -> set[str]:
        return {kind for node in nodes if (kind := self._type(node, env)) is not None}

    def _comprehension(
        self, generators: list[ast.comprehension], env: dict[str, str | None]
    ) -> dict[str, str | None]:
        inner = dict(env)
        for generator in generators:
            self._bind(generator.target, _element(self._type(generator.iter, inner)), inner)
            self._types(generator.ifs, inner)
        return inner

    def _attribute_type(self, node: ast.Attribute, env: dict[str, str | None]) -> str | None:
        owner = self._type(node.value, env)
        if owner is None:
            return ATTRIBUTES.get(node.attr)
        found = self._attribute(node, owner, node.attr)
        if found is None or node.attr == "__members__":
            return None
        if inspect.isclass(found):
            return f"class:{found.__qualname__}"
        if isinstance(found, property):
            kinds = {kind for _, kind in signatures(found.fget)}
            return self._returned(kinds)
        if callable(found):
            return f"method:{owner}.{node.attr}"
        return owner.removeprefix("class:")  # a member of an enumeration

    def _attribute(self, node: ast.AST, owner: str, name: str) -> Any:
        """Find an attribute of the module or of one of its classes; a fault if there is none."""
        self.num_uses += 1
        if name in ONLY_IN_RTX and not self._is_rtx:
            return None
        if owner.startswith("list["):
            if not hasattr(list, name):
                self._fault(node, f"a list has no .{name}")
            return None
        if owner == UNKNOWN:
            self._fault(node, f"cannot tell whose .{name} this is")
            return None
        holder = self._holder(owner)
        found = inspect.getattr_static(holder, name, None) if inspect.isclass(holder) else None
        if found is None or not isinstance(found, property):
            found = getattr(holder, name, None)
        if found is None:
            self._fault(node, f"{self._module.__name__} has no {owner}.{name}")
        return found

    def _holder(self, owner: str) -> Any:
        holder = self._module
        if owner != MODULE:
            for part in owner.removeprefix("class:").split("."):
                holder = getattr(holder, part)
        return holder

    def _call(self, node: ast.Call, env: dict[str, str | None]) -> str | None:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            return self._by_name(node, env)
        callee = self._type(node.func, env)
        self._types(arguments, env)
        if callee is None:
            return RETURNS.get(ast.unparse(node.func).rpartition(".")[2])
        kind, _, name = callee.partition(":")
        if kind == "class":
            self._arguments(node, f"{name}.__init__", self._holder(name).__init__)
            return name
        if kind != "method":
            self._fault(node, f"a {callee} is called")
            return UNKNOWN
        owner, _, method = name.rpartition(".")
        function = getattr(self._holder(owner), method)
        returned = self._arguments(node, name, function)
        return UNDOCUMENTED.get(name) or self._returned(returned)

    def _by_name(self, node: ast.Call, env: dict[str, str | None]) -> str | None:
        """Check getattr(an enumeration, a computed name)."""
        owner = self._type(node.args[0], env)
        self._types(node.args[1:], env)
        if owner is None:
            return None
        enumeration = owner.removeprefix("class:")
        if enumeration not in BY_NAME:
            self._fault(node, f"say in BY_NAME which members of {enumeration} are asked for")
        for name in BY_NAME.get(enumeration, ()):
            self._attribute(node, owner, name)
        return enumeration

    def _arguments(self, node: ast.Call, name: str, function: Any) -> set[str]:
        """Check a call against the signatures; what those that take it return."""
        self.num_uses += 1
        known = signatures(function)
        given = [keyword.arg for keyword in node.keywords]
        is_bound = (
            not (isinstance(node.args[0], ast.Name) and node.args[0].id == "self") if node.args else True
        )
        has_star = any(isinstance(argument, ast.Starred) for argument in node.args)
        num_positional = len(node.args) - (0 if is_bound else 1)
        returned = set()
        for parameters, kind in known:
            names = [parameter.name for parameter in parameters]
            needed = [parameter.name for parameter in parameters if not parameter.has_default]
            filled = set(names[:num_positional]) | set(given)
            if has_star or (
                num_positional <= len(names)
                and set(given) <= set(names[num_positional:])
                and set(needed) <= filled
            ):
                returned.add(kind)
        if not returned:
            takes = [[parameter.name for parameter in parameters] for parameters, _ in known]
            self._fault(node, f"{name} takes {takes}, not {num_positional} and {given}")
        return returned

    def _returned(self, kinds: set[str]) -> str | None:
        """Turn what a docstring says is returned into a type of the module's, or None."""
        if len(kinds) != 1:
            return UNKNOWN
        (kind,) = kinds
        element = re.fullmatch(r"(?:list|List|collections\.abc\.Sequence)\[(.+)\]", kind)
        if element:
            inner = self._returned({element[1]})
            return None if inner is None else f"list[{inner}]"
        if kind in ("None", "bool", "int", "float", "str", "tuple", "object", "capsule", "bytes"):
            return None
        return kind if hasattr(self._module, kind.partition(".")[0]) else UNKNOWN


def _is_any(annotation: ast.expr | None) -> bool:
    """Whether mypy would see Any in it, other than as the type of an array's numbers."""
    if annotation is None:
        return False
    return re.search(r"\bAny\b", ast.unparse(annotation).replace("NDArray[Any]", "")) is not None


def _element(kind: str | None) -> str | None:
    if kind is None or kind == UNKNOWN:
        return kind
    match = re.fullmatch(r"list\[(.+)\]", kind)
    return match[1] if match else UNKNOWN
