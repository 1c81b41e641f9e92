"""Random Python state read by forward, changed between calls and before backward: each call beside eager."""

from __future__ import annotations

import random
import sys
import threading
import types
from dataclasses import dataclass

import torch

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.fuzz.check import undisturbed
from tests.fuzz.verdict import Verdict, one_line

HEAD = """
import array, collections, contextvars, dataclasses, enum, functools, io, itertools, operator, os, sys, threading, types
import weakref
import multiprocessing as mp
import numpy as np
import torch
from torch import nn
class Cfg:
    def __init__(self, v, w=1): self.v, self.w = v, w
    def get(self): return self.v
class Slots:
    __slots__ = ("v", "w", "__weakref__")
    def __init__(self, v, w=1): self.v, self.w = v, w
@dataclasses.dataclass
class Data:
    v: object
    w: int = 1
class Prop:
    w = 1
    def __init__(self, v): self._v = v
    @property
    def v(self): return self._v
class Dyn:
    def __init__(self, v): self.data = {"v": v}
    def __getattr__(self, name):
        if name == "data": raise AttributeError(name)
        return self.data[name]
class Special:
    def __init__(self, v): self.held = v
    def __call__(self): return self.held
    def __getitem__(self, key): return self.held
    def __iter__(self): return iter([self.held])
    def __enter__(self): return self.held
    def __exit__(self, *_): return None
class Descriptor:
    def __init__(self, v): self.held = v
    def __get__(self, owner, kind): return self.held
def cell(v):
    def get(): return v
    def put(n):
        nonlocal v
        v = n
    return get, put
def identity(v, *_): return v
def within(o):
    with o as v: return v
def attempt(o):
    try: return o.absent
    except AttributeError: return o.v
"""

_BY_NAME = (
    """
{o}.v|getattr({o}, 'v')|getattr({o}, 'v', 9.)|operator.attrgetter('v')({o})|getattr({o}, chr(118))|attempt({o})
({o}.v if hasattr({o}, 'v') else 9.)
""".strip()
    .replace("\n", "|")
    .split("|")
)
_BY_DICT = [*_BY_NAME, "vars({o})['v']", "{o}.__dict__['v']", "{o}.__dict__.get('v')"]
_BY_KEY = (
    """
{o}['v']|{o}.get('v')|operator.itemgetter('v')({o})|[b for a, b in {o}.items() if a == 'v'][0]
dict({o})['v']|{**{o}}['v']
""".strip()
    .replace("\n", "|")
    .split("|")
)
_BY_PLACE = (
    """
{o}[0]|{o}[-2]|[*{o}][0]|next(iter({o}))|operator.getitem({o}, 0)|[a for a in {o}][0]|list(map(identity, {o}))[0]
next(a for _, a in enumerate({o}))|list(zip({o}, {o}))[0][1]|tuple({o})[0]
""".strip()
    .replace("\n", "|")
    .split("|")
)
_SET = ["{o}.v = {n}", "setattr({o}, 'v', {n})"]
_SET_DICT = [*_SET, "{o}.__dict__.update(v={n})", "del {o}.v; {o}.v = {n}", "vars({o})['v'] = {n}"]
_SET_KEY = ["{o}['v'] = {n}", "{o}.update(v={n})", "{o}.pop('v'); {o}['v'] = {n}"]

#: a holder: (lines that make it of a value, expressions that read the value, statements that set another, a change that
#: does not matter)
HOLDERS: dict[str, tuple[str, list[str], list[str], str]] = {
    "object": ("{o} = Cfg({v})", _BY_DICT, _SET_DICT, "{o}.w += 1"),
    "method": ("{o} = Cfg({v}).get", ["{o}()"], ["{o}.__self__.v = {n}"], "{o}.__self__.w += 1"),
    "slots": ("{o} = Slots({v})", _BY_NAME, _SET, "{o}.w += 1"),
    "dataclass": ("{o} = Data({v})", [*_BY_DICT, "dataclasses.astuple({o})[0]"], _SET_DICT, "{o}.w += 1"),
    "namespace": ("{o} = types.SimpleNamespace(v={v}, w=1)", _BY_DICT, _SET_DICT, "{o}.w += 1"),
    "property": ("{o} = Prop({v})", _BY_NAME, ["{o}._v = {n}"], "{o}.w = 2"),
    "__getattr__": ("{o} = Dyn({v})", _BY_NAME, ["{o}.data['v'] = {n}", "{o}.data = {'v': {n}}"], "{o}.data['w'] = 2"),
    "special": (
        "{o} = Special({v})",
        ["{o}()", "{o}[0]", "[*{o}][0]", "within({o})", "Special.__call__({o})", "next(iter({o}))"],
        ["{o}.held = {n}"],
        "{o}.w = 2",
    ),
    "descriptor": (
        "{o} = type('K', (), {'v': Descriptor({v})})()",
        _BY_NAME,
        ["type({o}).__dict__['v'].held = {n}", "type({o}).v = Descriptor({n})"],
        "{o}.w = 2",
    ),
    "class": ("{o} = type('K', (), {'v': {v}, 'w': 1})", _BY_NAME, _SET, "{o}.w = 2"),
    "of class": ("{o} = type('K', (), {'v': {v}})()", _BY_NAME, [*_SET, "type({o}).v = {n}"], "{o}.w = 2"),
    "of base": (
        "{o} = type('K', (type('B', (), {'v': {v}}),), {})()",
        _BY_NAME,
        ["type({o}).__base__.v = {n}", "type({o}).v = {n}"],
        "type({o}).w = 2",
    ),
    "static": (
        "{o} = type('K', (), {'get': staticmethod(functools.partial(identity, {v}))})()",
        ["{o}.get()"],
        ["type({o}).get = staticmethod(functools.partial(identity, {n}))"],
        "{o}.w = 2",
    ),
    "dict": ("{o} = {'v': {v}, 'w': 1}", _BY_KEY, [*_SET_KEY, "{o} |= {'v': {n}}"], "{o}['w'] += 1"),
    "ordered": ("{o} = collections.OrderedDict(v={v}, w=1)", _BY_KEY, _SET_KEY, "{o}['w'] += 1"),
    "default": ("{o} = collections.defaultdict(int, v={v})", _BY_KEY, _SET_KEY, "{o}['w'] += 1"),
    "missing": ("{o} = collections.defaultdict(lambda: {v})", ["{o}['v']"], ["{o}['v'] = {n}"], "{o}['w'] = 1"),
    "chain": (
        "{o} = collections.ChainMap({}, {'v': {v}})",
        _BY_KEY[:4],
        ["{o}['v'] = {n}", "{o}.maps[1]['v'] = {n}"],
        "",
    ),
    "user": ("{o} = collections.UserDict(v={v}, w=1)", _BY_KEY[:4], _SET_KEY, "{o}['w'] += 1"),
    "proxy": (
        "of_{o} = {'v': {v}, 'w': 1}\n{o} = types.MappingProxyType(of_{o})",
        _BY_KEY[:4],
        ["of_{o}['v'] = {n}", "of_{o}.update(v={n})"],
        "of_{o}['w'] += 1",
    ),
    "view": ("of_{o} = {'v': {v}}\n{o} = of_{o}.values()", ["[*{o}][0]", "list({o})[0]"], ["of_{o}['v'] = {n}"], ""),
    "list": ("{o} = [{v}, 1]", _BY_PLACE, ["{o}[0] = {n}", "{o}[:] = [{n}, 1]", "{o}.insert(0, {n}); {o}.pop(1)"], ""),
    "user list": ("{o} = collections.UserList([{v}, 1])", _BY_PLACE, ["{o}[0] = {n}", "{o}.data = [{n}, 1]"], ""),
    "deque": (
        "{o} = collections.deque([{v}, 1])",
        _BY_PLACE,
        ["{o}[0] = {n}", "{o}.popleft(); {o}.appendleft({n})"],
        "",
    ),
    "tuple": ("{o} = ({v}, 1)", _BY_PLACE, [], ""),
    "named": ("{o} = collections.namedtuple('T', 'v w')({v}, 1)", [*_BY_PLACE, "{o}.v", "{o}._asdict()['v']"], [], ""),
    "partial": (
        "{o} = functools.partial(identity, {v})",
        ["{o}()", "{o}.args[0]", "{o}(3)"],
        ["{o}.__setstate__((identity, ({n},), {}, {}))"],
        "",
    ),
    "closure": (
        "{o}, put_{o} = cell({v})",
        ["{o}()", "{o}.__closure__[0].cell_contents"],
        ["put_{o}({n})", "{o}.__closure__[0].cell_contents = {n}"],
        "",
    ),
    "default value": (
        "{o} = types.FunctionType(identity.__code__, {}, 'f', ({v},))",
        ["{o}()", "{o}.__defaults__[0]"],
        ["{o}.__defaults__ = ({n},)"],
        "{o}.w = 1",
    ),
    "function's attribute": ("{o} = lambda: 0\n{o}.v = {v}", _BY_DICT, _SET, "{o}.w = 1"),
    "cached": (
        "of_{o} = [{v}]\n{o} = functools.lru_cache(functools.partial(operator.getitem, of_{o}))",
        ["{o}(0)"],
        ["of_{o}[0] = {n}; {o}.cache_clear()", "of_{o}[0] = {n}"],
        "",
    ),
    "thread": ("{o} = threading.local()\n{o}.v = {v}", _BY_NAME, _SET, "{o}.w = 2"),
    "context": ("{o} = contextvars.ContextVar('c')\n{o}.set({v})", ["{o}.get()", "{o}.get(9.)"], ["{o}.set({n})"], ""),
    "enumeration": (
        "{o} = enum.Enum('E', 'A B')\n{o}.A.v = {v}",
        ["{o}.A.v", "{o}['A'].v", "next(iter({o})).v", "{o}(1).v"],
        ["{o}.A.v = {n}"],
        "{o}.B.v = 2",
    ),
    "module": ("{o} = types.ModuleType('t')\n{o}.v = {v}", _BY_DICT, _SET_DICT, "{o}.w = 2"),
    "object array": ("{o} = np.array([{v}, None], dtype=object)", ["{o}[0]", "{o}.tolist()[0]"], ["{o}[0] = {n}"], ""),
    "reference": (
        "of_{o} = Cfg({v})\n{o} = weakref.ref(of_{o})",
        ["{o}().v", "{o}().get()"],
        ["of_{o}.v = {n}"],
        "of_{o}.w = 2",
    ),
    "weak value": (
        "of_{o} = Cfg({v})\n{o} = weakref.WeakValueDictionary(k=of_{o})",
        ["{o}['k'].v", "{o}.get('k').v", "[*{o}.values()][0].v"],
        ["of_{o}.v = {n}", "of_{o} = Cfg({n}); {o}['k'] = of_{o}"],
        "of_{o}.w = 2",
    ),
}

#: the same, for numbers only
OF_NUMBERS: dict[str, tuple[str, list[str], list[str], str]] = {
    "array": (
        "{o} = np.array([{v}, 1.])",
        ["float({o}[0])", "{o}.tolist()[0]", "{o}.max().item()"],
        ["{o}[0] = {n}"],
        "",
    ),
    "python array": ("{o} = array.array('d', [{v}, 1.])", ["{o}[0]", "[*{o}][0]"], ["{o}[0] = {n}"], ""),
    "bytes": ("{o} = bytearray([int({v})])", ["float({o}[0])"], ["{o}[0] = int({n})"], ""),
    "text": ("{o} = io.StringIO(str({v}))", ["float({o}.getvalue())"], ["{o}.seek(0); {o}.write(str({n}))"], ""),
    "environment": (
        "{o} = os.environ\n{o}['TESTS_FUZZ'] = str({v})",
        ["float({o}['TESTS_FUZZ'])", "float(os.getenv('TESTS_FUZZ'))", "float({o}.get('TESTS_' + 'FUZZ'))"],
        ["{o}['TESTS_FUZZ'] = str({n})", "os.putenv('TESTS_NO', '1'); os.environ.update(TESTS_FUZZ=str({n}))"],
        "{o}['TESTS_OTHER'] = '1'",
    ),
    "value": ("{o} = mp.Value('d', {v})", ["{o}.value", "{o}.get_obj().value"], ["{o}.value = {n}"], ""),
    "set": (
        "{o} = {{v}, 0.5}",
        ["max({o})", "sorted({o})[-1]", "sum({o}) - 0.5"],
        ["{o}.clear(); {o}.update([{n}, 0.5])"],
        "",
    ),
    "counter": (
        "{o} = collections.Counter(v=int({v}))",
        ["float({o}['v'])", "float({o}.total())"],
        ["{o}['v'] = int({n})"],
        "",
    ),
    "size": ("{o} = [0] * int({v})", ["float(len({o}))", "sum(1. for _ in {o})"], ["{o}[:] = [0] * int({n})"], ""),
    "name": ("{o} = type('K' * int({v}), (), {})", ["float(len({o}.__name__))"], ["{o}.__name__ = 'K' * int({n})"], ""),
}

_PACKAGE = "P = sys.modules['tests_fuzz_package'] = types.ModuleType('p')"
#: a place of the outermost holder: (lines, expression in forward, statement that sets it)
ROOTS = {
    "attribute": ("", "self.held", "m.held = {n}"),
    "attribute of a layer": ("", "self.linear.held", "m.linear.held = {n}"),
    "class": ("", "self.of_class", "Net.of_class = {n}"),
    "global": ("", "G", "G = {n}"),
    "globals()": ("", "globals()['G']", "G = {n}"),
    "closure": ("read_root, put_root = cell(None)", "read_root()", "put_root({n})"),
    "default": ("def find(o=None): return o", "find()", "find.__defaults__ = ({n},)"),
    "keyword": ("def find(*, o=None): return o", "find()", "find.__kwdefaults__ = dict(o={n})"),
    "package": (_PACKAGE, "P.held", "P.held = {n}"),
    "imported": (
        _PACKAGE + "\ndef find():\n    from tests_fuzz_package import held\n    return held",
        "find()",
        "P.held = {n}",
    ),
    "registry": ("R = {}\ndef find(name): return R[name]", "find('a')", "R['a'] = {n}"),
    "stack": ("R = [None]\ndef find(): return R[-1]", "find()", "R[-1] = {n}"),
    "singleton": (
        "class One:\n    made = None\n    def __new__(cls):\n"
        "        cls.made = cls.made or object.__new__(cls)\n        return cls.made",
        "One().held",
        "One().held = {n}",
    ),
}

#: the access of forward to the value, with the outermost holder ``{r}`` and the expression ``{e}`` of ``o``
WAYS = (
    "v = {plain}",
    "o = {r}; v = {e}",
    "v = (lambda o: {e})({r})",
    "v = [{e} for o in ({r},)][0]",
    "v = helper({r})",
    "v = functools.partial(helper)({r})",
    "v = self.helper({r})",
    "v = list(map(helper, [{r}]))[0]",
    "v = max(({e} for o in [{r}]), key=lambda v: 1)",
    "for o in ({r},): v = {e}",
    "match {r}:\n            case o: v = {e}",
    "def inner(o=None): return {e_of_root}\n        v = inner()",
)

#: the use of the number
USES = (
    "return y * v",
    "return y * v",
    "return y + 1 if v > 2.5 else y",
    "return y * float(f'{v}')",
    "return y * len([0] * int(v))",
    "return y * {2.: 1., 3.: 4.}.get(v, 9.)",
    "return y if str(v) == '2.0' else y * 2",
    "return y * max(v, 2.5)",
    "return y * sum([v, 1])",
    "return torch.full_like(y, v) * y",
    "return y * torch.tensor(v)",
    "for _ in range(int(v)): y = y.sin()\n        return y",
    "return (y * v).detach() + y",
    "return torch.dropout(y, 0.1 * v / (v + 1), self.training)",
)


@dataclass(frozen=True)
class Changed:
    """A module, and changes of the state that it reads, each with whether eager's numbers may change."""

    seed: int
    source: str
    changes: tuple[tuple[str, bool], ...]


def generate_state(seed: int) -> Changed:
    """The program of a seed, always the same one."""
    rng = random.Random(seed)
    depth, holders = rng.choice((1, 1, 2, 2, 3, 4, 5)), []
    for level in range(depth):
        table = OF_NUMBERS if level == 0 and rng.random() < 0.25 else HOLDERS
        holders.append(table[rng.choice(list(table))])
    make = [_filled(each[0], o=f"n{i + 1}", v=f"n{i}") for i, each in enumerate(holders)]
    path = "{o}"
    for each in reversed(holders):
        path = _filled(rng.choice(each[1]), o=path)
    before, root, put = ROOTS[rng.choice(list(ROOTS))]
    of_o, of_root = _filled(path, o="o"), _filled(path, o=root)
    way = _filled(rng.choice(WAYS), r=root, e=of_o, plain=of_root, e_of_root=of_root)
    net = f"""
def helper(o): return {of_o}
class Net(nn.Module):
    of_class = None
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def helper(self, o): return {of_o}
    def forward(self, x):
        y = self.linear(x)
        {way}
        {rng.choice(USES)}
m = Net()
"""
    source = "\n".join([HEAD, before, net, "n0 = 2.0", *make, _filled(put, n=f"n{depth}")])
    changes, value = [], 2.0
    for _ in range(rng.randint(3, 5)):
        kind, level = rng.random(), rng.randint(1, depth + 1)
        if kind < 0.25:
            others = [_filled(each[3], o=f"n{i + 1}") for i, each in enumerate(holders) if each[3]]
            changes.append((rng.choice([*others, "m.not_read = 1", "G_other = 1"]), False))
            continue
        value = value if kind < 0.4 else value + 1
        while level <= depth and not holders[level - 1][2]:
            level += 1
        text = put if level > depth else rng.choice(holders[level - 1][2])
        lines = [f"n0 = {value}", *make[: level - 1], _filled(text, o=f"n{level}", n=f"n{level - 1}")]
        changes.append(("\n".join(lines), kind >= 0.4))
    return Changed(
        seed, source + "\n# then: " + "\n# then: ".join(text.replace("\n", "; ") for text, _ in changes), tuple(changes)
    )


def _filled(text: str, **names: str) -> str:
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", value)
    return text


@undisturbed
def check_state(program: Changed) -> Verdict:
    """Calls a module, changes its state, calls it again: results and gradients must be eager's."""
    rng, name = random.Random(program.seed), f"tests_fuzz_state_{program.seed}"
    space = sys.modules[name] = types.ModuleType(name)
    try:
        try:
            exec(compile(program.source, name, "exec"), space.__dict__)
        except Exception as error:  # noqa: BLE001 - incompatible holders
            return Verdict("skipped", one_line(error))
        return _check(program, rng, space.__dict__)
    finally:
        for each in (name, "tests_fuzz_package"):
            sys.modules.pop(each, None)


def _check(program: Changed, rng: random.Random, space: dict) -> Verdict:
    module, x = space["m"], torch.randn(3, 4, requires_grad=True)
    on_miss, missed = rng.choice(("eager", "compile")), ""

    def run(call, between: str = "") -> list[torch.Tensor]:
        torch.manual_seed(0)
        result = call(x)
        if between:
            exec(between, space)
        return [result.detach().clone(), *torch.autograd.grad(result.sum(), [x, *module.parameters()])]

    try:
        run(module.forward)
    except Exception as error:  # noqa: BLE001 - a program that eager does not run
        return Verdict("skipped", one_line(error))
    try:
        if rng.random() < 0.8:
            add_tvm_dispatch(module, x, on_miss=on_miss)
        else:
            add_tvm_dispatch(module, on_miss="compile")
        steps, same = [("", False), *program.changes], True
        for position, (text, matters) in enumerate(steps):
            if rng.random() < 0.3 and not ("threading.local" in program.source or "ContextVar" in program.source):
                thread = threading.Thread(target=exec, args=(text, space))
                thread.start()
                thread.join()
            else:
                exec(text, space)
            between = steps[position + 1][0] if position + 1 < len(steps) and rng.random() < 0.3 else ""
            hits = stats(module).hits
            try:
                wanted = run(module.forward)
            except Exception as error:  # noqa: BLE001 - the change leaves nothing to read: it raises there as well
                try:
                    run(module)
                except type(error):
                    break
                return Verdict("wrong", f"stale after {text!r}: eager raises {one_line(error)}")
            found = run(module, between)  # a change after forward precedes the next call as well
            told = text.replace("\n", "; ")
            for one, other in zip(found, wanted, strict=True):
                if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                    return Verdict(
                        "wrong",
                        f"stale after {told!r} (then {between!r}): {one.flatten()[:3]} for {other.flatten()[:3]}",
                    )
            same = same and not matters if on_miss == "eager" else not matters
            if same and position and stats(module).hits == hits and not missed and not between:
                missed = f"missed after {told!r}: {[*stats(module).misses][-1:]}"
    except UnsupportedModule as error:
        return Verdict("refused", one_line(error))
    except Exception as error:  # noqa: BLE001 - any
        return Verdict("crash", one_line(error))
    return Verdict("missed", missed) if missed else Verdict("same")
