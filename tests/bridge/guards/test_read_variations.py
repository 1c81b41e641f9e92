"""Forward's reads, by kind × holder × way of reading × change; the next call is eager's.

A case is a module in a file of its own, made from the tables. Unread objects change first, and equal data replaces the
read object: these calls hit. ``make test`` runs every 13th case, ``make test-all`` all.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from functools import partial
from typing import NamedTuple

import pytest
import torch

from bridge import add_tvm_dispatch, stats
from tests.sampling import sampled

HEAD = """
import array, bisect, collections, configparser, contextlib, contextvars, copy, ctypes, dataclasses, datetime, decimal
import enum, fractions, functools, inspect, io, itertools, logging, operator, os, pathlib, queue, re, string, threading
import types, weakref, xml.etree.ElementTree as ET
import numpy as np, torch
from torch import nn
from types import SimpleNamespace as NS
KEPT = []
class Cfg:
    base = 0.
    def __init__(self, k): self.k = k
    def get(self): return self.k
    def __call__(self): return self.k
    def __getitem__(self, key): return self.k
    def __iter__(self): return iter([self.k])
    def __float__(self): return self.k
    def __mul__(self, other): return self.k * other
    def __enter__(self): return self.k
    def __exit__(self, *error): pass
    @property
    def value(self): return self._k
    def __getattr__(self, name): return self.__dict__['more'][name]
class Slots:
    __slots__ = ('k',)
    def __init__(self, k): self.k = k
class Descriptor:
    def __init__(self, k): self.k = k
    def __get__(self, owner, kind=None): return self.k
@dataclasses.dataclass
class Data:
    k: float
    other: int = 0
class Color(enum.Enum):
    RED = 1
class Point(collections.namedtuple('Point', 'x y')): pass
def kind(**names): return type('Made', (Cfg,), names)
def made(value, **names):
    for name, each in names.items(): setattr(value, name, each)
    return value
def kept(value):
    KEPT.append(value)
    return value
def local(k): return made(threading.local(), k=k)
def logger(level):
    found = logging.Logger('tests.variations')
    found.setLevel(int(level))
    return found
def function(k):
    def value(): return k
    return value
def used(value, name, k, *args):
    if k == 3.: getattr(value, name)(*args)
    return value
def with_(h):
    with h as k: return k
def tried(h):
    try: return h.late
    except AttributeError: return 2.
def missing(h):
    try: return h['k']
    except KeyError: return h['j']
def of_class(h):
    match h:
        case NS(k=k): return k
def looped(h):
    found = 1.
    for each in h:
        if each == 0.: break
        found *= each
    else: return found
    return 0.
def walked(h): return h.k if h.n is None else h.k * walked(h.n)
def lazy(h): return h.k if h.held is None else h.held
def config(k):
    found = configparser.ConfigParser()
    found.read_dict({'a': {'k': str(k)}})
    return found
def by_position(h):
    kind = type(h)
    match h:
        case kind(k): return k
def matched(h):
    match h:
        case {'k': k}: return k
        case [k, *_]: return k
"""
# kind: an object made of a number K | the read of it, h | a change in place; "=": an equal one in its place is a hit
KINDS = """
number =: K | h
text =: str(K) | float(h)
tuple =: (K, 1) | h[0]
list =: [K] | h[0] | h[0] = 3.
appended =: [K] | h[-1] | h.append(3.)
length =: [1] * int(K) | float(len(h)) | h.append(1)
sum of a list =: [K] | sum(h) | h[0] = 3.
unpacked =: [K, 1.] | (lambda a, b: a)(*h) | h[0] = 3.
comprehension =: [K, 1.] | [v for v in h if v > 1.][0] | h[0] = 3.
list of lists =: [[K]] | h[0][0] | h[0][0] = 3.
sorted =: [K, 1.] | sorted(h)[-1] | h[0] = 3.
zipped =: [K] | dict(zip('k', h))['k'] | h[0] = 3.
matched =: {'k': K} | matched(h) | h['k'] = 3.
dict =: {'k': K} | h['k'] | h['k'] = 3.
dict.get =: {'k': K} | h.get('k', 1.) | h['k'] = 3.
late key: {'j': K} | h.get('k', h['j']) | h['k'] = 3.
in a dict: {'j': K} | h['j'] + ('k' in h) | h['k'] = 1
pairs =: {'k': K} | sum(v for n, v in h.items()) | h['k'] = 3.
joined dicts =: {'k': K} | {**h, 'j': 1.}['k'] | h['k'] = 3.
keywords =: {'k': K} | (lambda k: k)(**h) | h['k'] = 3.
dict of lists =: {'k': [K]} | h['k'][0] | h['k'].insert(0, 3.)
order =: {'a': K, 'b': 1.} | next(iter(h.values())) | h['a'] = h.pop('b')
set =: {K} | sum(h) | h.add(1.)
frozenset =: frozenset([K]) | sum(h)
deque =: collections.deque([K]) | h[0] | h.appendleft(3.)
OrderedDict =: collections.OrderedDict(a=K, b=7.) | [*h.values()][0] | h.move_to_end('a')
Counter =: collections.Counter(k=int(K)) | float(h['k']) | h.update(['k'])
default_factory: collections.defaultdict(function(K)) | h.copy()['k'] | h.default_factory = function(3.)
length of a deque =: collections.deque([1.], int(K)) | float(h.maxlen)
order of an array =: np.ones((2, 2), order='C' if K == 2. else 'F') | 2. + h.flags.f_contiguous
format of a memoryview: memoryview(b'ab').cast('b' if K == 2. else 'B') | 2. + (h.format == 'B')
ChainMap: collections.ChainMap({}, {'k': K}) | h['k'] | h.maps[1]['k'] = 3.
UserDict: collections.UserDict(k=K) | h['k'] | h.data['k'] = 3.
UserList: collections.UserList([K]) | h[0] | h.data[0] = 3.
UserString: collections.UserString(str(K)) | float(str(h)) | h.data = '3.'
proxy of a dict: types.MappingProxyType(kept({'k': K})) | h['k'] | KEPT[-1]['k'] = 3.
view of a dict: kept({'k': K}).values() | sum(h) | KEPT[-1]['k'] = 3.
bound dict.get: {'k': K}.get | h('k') | h.__self__['k'] = 3.
itemgetter: kept({'k': K}) | operator.itemgetter('k')(h) | h['k'] = 3.
bytes =: bytes([int(K)]) | float(h[0])
bytearray =: bytearray([int(K)]) | float(h[0]) | h[0] = 3
memoryview: memoryview(bytearray([int(K)])) | float(h[0]) | h[0] = 3
array.array =: array.array('d', [K]) | h[0] | h[0] = 3.
StringIO: io.StringIO(str(K)) | float(h.getvalue()) | h.seek(0); h.write('3')
BytesIO: io.BytesIO(b'%d' % K) | float(h.getvalue()) | h.seek(0); h.write(b'3')
NumPy array =: np.array([K]) | float(h[0]) | h[0] = 3.
NumPy's scalar =: np.float64(K) | float(h)
array of objects: np.array([NS(k=K)], object) | h[0].k | h[0].k = 3.
iterator over objects: kept(np.array([NS(k=K)], object)).flat | h[0].k | KEPT[-1][0].k = 3.
masked array: np.ma.array([K], mask=[False]) | float(h.sum() or 5.) | h[0] = 3.
structured array: np.array([(K,)], [('k', float)]) | float(h['k'][0]) | h['k'] = 3.
namespace: NS(k=K) | h.k | h.k = 3.
namespaces in one another: NS(a=NS(b=NS(c=NS(k=K)))) | h.a.b.c.k | h.a.b.c.k = 3.
object =: Data(K) | h.k | h.k = 3.
fields =: Data(K) | dataclasses.asdict(h)['k'] | h.k = 3.
slots: Slots(K) | h.k | h.k = 3.
method: Cfg(K) | h.get() | h.k = 3.
called: Cfg(K) | h() | h.k = 3.
subscript: Cfg(K) | h['k'] | h.k = 3.
iterated: Cfg(K) | [*h][0] | h.k = 3.
converted: Cfg(K) | float(h) | h.k = 3.
operator: Cfg(K) | h * 1. | h.k = 3.
context: Cfg(K) | with_(h) | h.k = 3.
property: made(Cfg(1.), _k=K) | h.value | h._k = 3.
__getattr__: made(Cfg(1.), more={'z': K}) | h.z | h.more['z'] = 3.
getattr: Cfg(K) | getattr(h, 'kk'[0]) | h.k = 3.
getattr with a default: Cfg(K) | h.k + getattr(NS(**vars(h)), 'late', 0.) | h.late = 1.
vars: Cfg(K) | vars(h)['k'] | h.k = 3.
__dict__ =: NS(k=K) | h.__dict__['k'] | h.__dict__ .update(k=3.)
attribute that is not there: NS(j=K) | h.j if not hasattr(h, 'late') else 3. | h.late = 1
except AttributeError: NS(j=K) | h.j * tried(h) / 2. | h.late = 3.
attrgetter: NS(a=NS(k=K)) | operator.attrgetter('a.k')(h) | h.a.k = 3.
another class: Cfg(K) | h.k + h.base | h.__class__ = kind(base=1.)
class attribute: kind(k=K) | h.k | h.k = 3.
class of an object: kind(base=K)(1.) | h.base | type(h).base = 3.
inherited: type('Sub', (kind(base=K),), {})(1.) | h.base | type(h).__mro__[1].base = 3.
shown over the base: type('Sub', (kind(base=K),), {})(1.) | h.base | type(h).base = 3.
class in a class: kind(inner=kind(k=K)) | h.inner.k | h.inner.k = 3.
metaclass: type('Me', (type,), {'k': K})('C', (), {}) | h.k | type(h).k = 3.
descriptor: kind(d=Descriptor(K))(1.) | h.d | type(h).__dict__['d'].k = 3.
property of a class: kind(p=property(lambda s: K))(1.) | h.p | type(h).p = property(lambda s: 3.)
classmethod: kind(base=K, get=classmethod(lambda c: c.base)) | h.get() | h.base = 3.
staticmethod: kind(get=staticmethod(function(K))) | h.get() | h.get = staticmethod(function(3.))
enum member: made(Color.RED, k=K) | h.k | h.k = 3.
enum by name: made(Color.RED, k=K) and Color | h['RED'].k | h.RED.k = 3.
named tuple =: Point(K, 1) | h.x
list in a named tuple: Point([K], 1) | h.x[0] | h.x[0] = 3.
cached property: type('P', (Cfg,), {'c': functools.cached_property(Cfg.get)})(K) | h.c | h.__dict__['c'] = 3.
context variable: contextvars.ContextVar('v', default=K) | h.get() | h.set(3.)
threading.local: local(K) | h.k | h.k = 3.
weak reference: weakref.ref(kept(Cfg(K))) | h().k | h().k = 3.
weak method: weakref.WeakMethod(kept(Cfg(K)).get) | h()() | KEPT[-1].k = 3.
weak proxy: weakref.proxy(kept(Cfg(K))) | h.k | h.k = 3.
weak values: weakref.WeakValueDictionary(a=kept(Cfg(K))) | h['a'].k | h['a'].k = 3.
weak keys: weakref.WeakKeyDictionary({kept(Cfg(1.)): K}) | sum(h.values()) | h[KEPT[-1]] = 3.
lock: used(threading.Lock(), 'acquire', K) | 2. + h.locked() | h.acquire()
event: used(threading.Event(), 'set', K) | 2. + h.is_set() | h.set()
queue: used(queue.Queue(), 'put', K, 1) | 2. + h.qsize() | h.put(1)
SimpleQueue: used(queue.SimpleQueue(), 'put', K, 1) | 2. + h.qsize() | h.put(1)
c_double: ctypes.c_double(K) | h.value | h.value = 3.
ctypes array: (ctypes.c_double * 1)(K) | h[0] | h[0] = 3.
partial: functools.partial(float, K) | h()
partial of an object: functools.partial(getattr, Cfg(K), 'k') | h() | h.args[0].k = 3.
lambda: (lambda: K) | h()
function: function(K) | h() | h.__code__ = function(1.).__code__; h.__closure__[0].cell_contents = 3.
closure cell: function(K) | h.__closure__[0].cell_contents | h.__closure__[0].cell_contents = 3.
defaults: (lambda k=K: k) | h() | h.__defaults__ = (3.,)
keyword defaults: (lambda *, k=K: k) | h() | h.__kwdefaults__ = {'k': 3.}
attribute of a function: made(function(1.), k=K) | h.k | h.k = 3.
bound method: Cfg(K).get | h() | h.__self__.k = 3.
lru_cache: functools.lru_cache(kept(Cfg(K)).get) | h() | KEPT[-1].k = 3.; h.cache_clear()
singledispatch: functools.singledispatch(lambda k, v=K: v) | h(1) | h.register(int, lambda k: 3.)
module: made(types.ModuleType('m'), k=K) | h.k | h.k = 3.
dictionary of a module: made(types.ModuleType('m'), k=K) | h.__dict__['k'] | h.k = 3.
late name of a module: made(types.ModuleType('m'), j=K) | getattr(h, 'k', h.j) | h.k = 3.
logger: logger(K) | float(h.getEffectiveLevel()) | h.setLevel(3)
decimal =: decimal.Decimal(str(K)) | float(h)
fraction =: fractions.Fraction(K) | float(h)
path =: pathlib.Path(f'a/{K}') | float(h.name)
time =: datetime.timedelta(seconds=K) | h.total_seconds()
pattern: re.compile('a' * int(K)) | float(h.match('aaa').end())
range =: range(int(K)) | float(len(h))
template =: string.Template(f'$a{K}').template[2:] | float(h)
tensor: torch.tensor([K]) | h | h.fill_(3.)
tensors in a list: [torch.tensor([K])] | h[0] | h[0].mul_(1.5)
attribute of a tensor: made(torch.ones(1), k=K) | h.k | h.k = 3.
shape of a tensor: torch.ones(int(K)) | float(h.shape[0]) | h.resize_(3)
length of a tensor: torch.ones(int(K)) | float(len(h)) | h.resize_(3)
size of a tensor: torch.ones(int(K)) | float(h.size(0)) | h.resize_(3)
dtype of a tensor: torch.ones(1, dtype=torch.float32 if K == 2. else torch.float64) | 2. + (h.dtype is torch.float64)
like a tensor: torch.ones(1, dtype=torch.float32 if K == 2. else torch.int32) | torch.full((), 2.5).to(h).float()
strides of a tensor: torch.ones(3, 3) if K == 2. else torch.ones(3, 3).t() | 2. + h.is_contiguous() | h.t_()
requires_grad: torch.ones(1, requires_grad=K == 3.) | 2. + h.requires_grad | h.requires_grad_()
module of torch: made(nn.Identity(), k=K) | h.k | h.k = 3.
training flag: made(nn.Identity(), training=K == 2.) | 2. + h.training | h.training = False
dtype =: torch.float32 if K == 2. else torch.float64 | 2. + (h is torch.float32)
device =: torch.device('cpu', int(K)) | float(h.index)
is =: int if K == 2. else float | 2. + (h is float)
isinstance: made(Cfg(K), cls=Data) | h.k + isinstance(h, h.cls) | h.__class__ = type('D', (h.cls,), {})
exception: ValueError(K) | h.args[0] | h.args = (3.,)
name of a class: type('K' * int(K), (), {}) | float(len(h.__name__)) | h.__name__ = 'KKK'
documentation: made(function(1.), __doc__='k' * int(K)) | float(len(h.__doc__)) | h.__doc__ = 'kkk'
annotations: made(function(1.), __annotations__={'k': K}) | h.__annotations__['k'] | h.__annotations__['k'] = 3.
shown as text: NS(k=K) | float(repr(h)[12:-1]) | h.k = 3.
formatted: [K] | float(f'{h[0]}') | h[0] = 3.
compared: [K] | 2. if h == [2.] else 3. | h[0] = 3.
truth =: [1] * (K == 2.) | 2. if h else 3. | h.clear()
any: [K - 2.] | 2. + any(h) | h.append(1.)
max by a key: [Cfg(K), Cfg(1.)] | max(h, key=Cfg.get).k | h[1].k = 3.
reduced: [K, 1.] | functools.reduce(operator.mul, h) | h[1] = 3.
chained: [[K], [1.]] | sum(itertools.chain.from_iterable(h)) | h[1].append(1.)
islice: [1., K] | [*itertools.islice(h, 1, 2)][0] | h[1] = 3.
reversed: [K, 1.] | [*reversed(h)][1] | h[0] = 3.
enumerated: [K] | [v for i, v in enumerate(h)][0] | h[0] = 3.
filtered: [K, 0.] | [*filter(None, h)][0] | h[0] = 3.
mapped: [str(K)] | [*map(float, h)][0] | h[0] = '3'
starred: [K, 1.] | (lambda *a: a[0])(*h) | h[0] = 3.
walrus: {'k': K} | (v if (v := h.get('k')) else 1.) | h['k'] = 3.
slice: [K, 1.] | h[:1][0] | h[0] = 3.
copied: [K] | h.copy()[0] | h[0] = 3.
order of a set: set([1., 9.] if K == 2. else [9., 1.]) | next(iter(h))
order of a frozenset: frozenset([1., 9.] if K == 2. else [9., 1.]) | next(iter(h))
types in a set: {1 if K == 2. else 1.} | 2. + isinstance([*h][0], float)
types in a frozenset: frozenset([1 if K == 2. else 1.]) | 2. + isinstance([*h][0], float)
type of a number =: 2 if K == 2. else 2. | 2. + isinstance(h, float)
True or 1 =: 1 if K == 2. else True | 2. + (h is True)
sign of a zero =: 0. if K == 2. else -0. | 2. + str(h).startswith('-')
type of a key =: {1: 0} if K == 2. else {True: 0} | 2. + (type([*h][0]) is bool)
size =: torch.Size([int(K)]) | float(h[0])
finfo: torch.finfo(torch.float16 if K == 2. else torch.float32) | float(h.bits)
generator's seed: torch.Generator().manual_seed(int(K)) | float(h.initial_seed()) | h.manual_seed(3)
a parameter: torch.ones(1) if K == 2. else nn.Parameter(torch.ones(1)) | 2. + isinstance(h, nn.Parameter)
leaf: torch.ones(1) if K == 2. else torch.ones(1, requires_grad=True) * 1 | 2. + (not h.is_leaf)
gradient of a tensor: made(torch.ones(1, requires_grad=True), grad=None if K == 2. else torch.ones(1))
  | 2. + (h.grad is not None) | h.grad = torch.ones(1)
offset of a tensor: torch.ones(4)[int(K):] | float(h.storage_offset())
modules in a list: nn.ModuleList([nn.Identity()] * int(K)) | float(len(h)) | h.append(nn.Identity())
parameters of a module: nn.ParameterList([nn.Parameter(torch.ones(1))] * int(K)) | float(len([*h]))
  | h.append(nn.Parameter(torch.ones(1)))
dtype of a module: nn.Linear(1, 1).to(torch.float32 if K == 2. else torch.float64)
  | 2. + (next(h.parameters()).dtype is torch.float64) | h.double()
keys of a module: nn.Sequential(*[nn.ReLU(), nn.Linear(1, 1)][: int(K) - 1]) | 2. + len(h.state_dict())
  | h.append(nn.Linear(1, 1))
names in a module: nn.Sequential(*[nn.Identity() for _ in range(int(K))]) | float(len([*h.children()]))
  | h.add_module('late', nn.Identity())
late attribute of a module: made(nn.Identity(), j=K) | h.j + hasattr(h, 'late') | h.late = 1
method of a class: kind(base=1., get=lambda s: K)(1.) | h.get() | type(h).get = lambda s: 3.
special method of a class: kind(__call__=lambda s: K)(1.) | h() | type(h).__call__ = lambda s: 3.
truth of an object: kind(__bool__=lambda s: K == 2.)(1.) | 2. if h else 3. | type(h).__bool__ = lambda s: False
length of an object: kind(__len__=lambda s: int(K))(1.) | float(len(h)) | type(h).__len__ = lambda s: 3
contained in an object: kind(__contains__=lambda s, k: K == 3.)(1.) | 2. + (1 in h)
  | type(h).__contains__ = lambda s, k: True
equal to an object: kind(__eq__=lambda s, o: K == 3., __hash__=None)(1.) | 2. + (h == 1)
  | type(h).__eq__ = lambda s, o: True
negated: kind(__neg__=lambda s: -K)(1.) | -(-h) | type(h).__neg__ = lambda s: -3.
from the right: kind(__rmul__=lambda s, o: o * K)(1.) | 1. * h | type(h).__rmul__ = lambda s, o: o * 3.
rounded: kind(__round__=lambda s: int(K))(1.) | float(round(h)) | type(h).__round__ = lambda s: 3
index: kind(__index__=lambda s: int(K))(1.) | [1., 1., 2., 3.][h] | type(h).__index__ = lambda s: 3
text of an object: kind(__str__=lambda s: str(K))(1.) | float(f'{h}') | type(h).__str__ = lambda s: '3'
format of an object: kind(__format__=lambda s, f: str(K))(1.) | float(f'{h:x}') | type(h).__format__ = lambda s, f: '3'
missing key: type('D', (dict,), {'__missing__': lambda s, k: K})() | h['k'] | h['k'] = 3.
missing key of a class: type('D', (dict,), {'__missing__': lambda s, k: K})() | h['k']
  | type(h).__missing__ = lambda s, k: 3.
attribute of a list: made(type('L', (list,), {})([1.]), k=K) | h.k | h.k = 3.
entries of a list of its own: type('L', (list,), {})([K]) | h[0] | h[0] = 3.
reference that dies: weakref.ref(kept(Cfg(1.)) if K == 2. else Cfg(1.)) | 2. + (h() is None) | KEPT.clear()
generator: kind(__iter__=lambda s: (v for v in [s.k]))(K) | [*h][0] | h.k = 3.
generator function: function([K]) | [*(v for v in h())][0] | h()[0] = 3.
handlers of a logger: made(logger(1), handlers=[logging.NullHandler()] * int(K)) | float(len(h.handlers))
  | h.handlers.append(logging.NullHandler())
level of a parent: made(logger(0), parent=logger(K)) | float(h.getEffectiveLevel()) | h.parent.setLevel(3)
configuration: config(K) | h.getfloat('a', 'k') | h.set('a', 'k', '3')
section: config(K)['a'] | float(h['k']) | h['k'] = '3'
element of XML: ET.fromstring(f'<a k="{K}"/>') | float(h.get('k')) | h.set('k', '3')
child in XML: ET.fromstring(f'<a><b>{K}</b></a>') | float(h.find('b').text) | h[0].text = '3'
copy: Data(K) | copy.copy(h).k | h.k = 3.
deep copy: NS(a=[K]) | copy.deepcopy(h).a[0] | h.a[0] = 3.
replaced field =: Data(K) | dataclasses.replace(h, other=1).k | h.k = 3.
fields as a tuple =: Data(K) | dataclasses.astuple(h)[0] | h.k = 3.
methodcaller: {'k': K} | operator.methodcaller('get', 'k')(h) | h['k'] = 3.
accumulated: [1., K] | [*itertools.accumulate(h, operator.mul)][-1] | h[1] = 3.
starmap: [(K, 1.)] | [*itertools.starmap(operator.mul, h)][0] | h[0] = (3., 1.)
product: [K] | [*itertools.product(h, [1.])][0][0] | h[0] = 3.
takewhile: [K, 0.] | sum(itertools.takewhile(bool, h)) | h[1] = 1.
pattern by position: Data(K) | by_position(h) | h.k = 3.
positions of a pattern: kind(__match_args__=('k',), j=3.)(K) | by_position(h) | type(h).__match_args__ = ('j',)
behind a pattern by position: Data(NS(k=K)) | by_position(h).k | h.k.k = 3.
grouped: [K] | [k for k, _ in itertools.groupby(h)][0] | h[0] = 3.
longest: [K] | [*itertools.zip_longest(h, [])][0][0] | h[0] = 3.
signature: (lambda k=K: k) | inspect.signature(h).parameters['k'].default | h.__defaults__ = (3.,)
wrapped: functools.wraps(function(K))(lambda: 1.) | h.__wrapped__() | h.__wrapped__ = function(3.)
exception that is raised: {'j': K} | missing(h) | h['k'] = 3.
class pattern: NS(k=K) | of_class(h) | h.k = 3.
manager by a generator: contextlib.contextmanager(kind(__iter__=lambda s: iter([s.k]))(K).__iter__) | with_(h())
  | h.__wrapped__.__self__.k = 3.
joined text: [str(K)] | float(''.join(h)) | h[0] = '3'
percent: (K,) | float('%s' % h)
format of keywords: {'k': K} | float('{k}'.format(**h)) | h['k'] = 3.
encoded: [str(K)] | float(h[0].encode().decode()) | h[0] = '3'
evaluated: Cfg(K) | eval('a.k', {'a': h}) | h.k = 3.
loop: [K, 1.] | looped(h) | h[1] = 3.
recursion: NS(k=1., n=NS(k=K, n=None)) | walked(h) | h.n.k = 3.
two closures: (lambda a: (lambda: (lambda: a[0])()))([K]) | h() | h.__closure__[0].cell_contents[0] = 3.
class in a list: [kind(k=K)] | h[0].k | h[0].k = 3.
callback in a dict: {'f': function(K)} | h['f']() | h['f'] = function(3.)
registry: {'f': Cfg(K).get} | h['f']() | h['f'].__self__.k = 3.
stack of settings: [NS(k=1.), NS(k=K)] | h[-1].k | h.append(NS(k=3.))
lazily made: NS(held=None, k=K) | lazy(h) | h.held = h.k = 3.
flags: re.RegexFlag(int(K)) | float(h.value)
ordered by a key: [Cfg(1.), Cfg(K)] | sorted(h, key=operator.attrgetter('k'))[-1].k | h[0].k = 3.
minimum: [K, 5.] | min(h, default=1.) | h.append(1.)
difference =: {1, *range(int(K))} | float(len(h - {1}) + 1) | h.add(7)
counted =: [7.] * int(K) | float(h.count(7.)) | h.append(7.)
found: [7., K] if K == 3. else [K, 7.] | 2. + h.index(7.) | h.insert(0, 0.)
searched: [1., 4.] if K == 2. else [0., 0.] | 2. + bisect.bisect(h, 2.) | h[1] = 1.
setdefault that finds: {'k': K} | dict(h).setdefault('k', 1.) | h['k'] = 3.
"""
OF_THREADS = ("context variable", "threading.local")
"""Kinds that each thread has of its own."""
# holder: expressions for the held object in forward and outside, and an assignment of another one, NEW
HELD = {
    "attribute": ("self.h", "m.h", "m.h = NEW"),
    "global": ("H", "USER['H']", "USER['H'] = NEW"),
    "closure": ("h", "GET()", "PUT(NEW)"),
    "default": ("h", "FUNCTION.__defaults__[0]", "FUNCTION.__defaults__ = (NEW,)"),
    "package": ("PACKAGE.H", "USED['H']", "USED['H'] = NEW"),
}
# how forward reads it: its body
READ = {
    "direct": "return x * (READ)",
    "helper": "return x * read(HELD)",
    "property": "return x * self.p",
    "nested": "return x * (lambda: READ)()",
}
_HELD = re.compile(r"\bh\b")
CHANGED = ("assignment", "in place", "another thread")


class Kind(NamedTuple):
    """A row of the table; ``is_plain``: forward cannot tell an equal object in its place."""

    make: str
    read: str
    change: str
    is_plain: bool


def kinds() -> dict[str, Kind]:
    found = {}
    for line in KINDS.strip().replace("\n  |", " |").split("\n"):
        name, row = line.split(": ", 1)
        make, read, change = [*(each.strip() for each in row.split(" | ")), ""][:3]
        found[name.removesuffix(" =")] = Kind(make, read, change, name.endswith(" ="))
    return found


ROWS = kinds()
CASES = [
    (kind, held, [*READ][(row + place) % len(READ)], CHANGED[(row + place) % len(CHANGED)])
    for row, kind in enumerate(ROWS)
    for place, held in enumerate(HELD)
]
ALWAYS = CASES[::13]


def build(kind, held, read, path, monkeypatch):
    """A module of a case, and the namespaces of its changes."""
    row, package = ROWS[kind], f"read_{path.name}"
    expression = HELD[held][0].replace("PACKAGE", package)
    value = _HELD.sub(expression, row.read)
    body = READ[read].replace("READ", value).replace("HELD", expression)
    if (held, read) == ("package", "helper"):
        body = f"return x * {package}.value()"
    given = dict.fromkeys(("property", "forward"), "")
    if held == "default":
        given["property" if read == "property" else "forward"] = ", h=FIRST"
    shared = f"{HEAD}def new(K): return {row.make}\ndef read(h): return {row.read}\n"
    used = f"{shared}H = new(2.)\ndef value(): return {_HELD.sub('H', row.read)}\n"
    user = f"""{shared}
import {package}
H = FIRST = new(2.)
def build(h):
    def put(v):
        nonlocal h
        h = v
    class M(nn.Module):
        def forward(self, x{given["forward"]}): {body}
        @property
        def p(self{given["property"]}): return {value if read == "property" else 0}
    return M(), put, lambda: h
"""
    folder = path / "site-packages"
    folder.mkdir()
    for place, name, text in ((folder, package, used), (path, f"user_{package}", user)):
        (place / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(place))
    space = importlib.import_module(f"user_{package}").__dict__
    module, put, get = space["build"](space["FIRST"])
    if held == "attribute":
        module.h = space["FIRST"]
    function = type(module).p.fget if read == "property" else type(module).forward
    names = {"m": module, "PUT": put, "GET": get, "USER": space, "USED": vars(sys.modules[package])}
    return module, {**names, "FUNCTION": function}


def act(case, change, names):
    """Changes the held object in place, or replaces it by another one made of a number."""
    kind, held, *_ = case
    _, present, assign = HELD[held]
    space = {**names["USED" if held == "package" else "USER"], **names}
    if change is None:
        exec(ROWS[kind].change, {**space, "h": eval(present, space)})
    else:
        exec(assign, {**space, "NEW": space["new"](change)})


@pytest.fixture(autouse=True)
def put_back():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("read_", "user_")):
            del sys.modules[name]


@pytest.mark.parametrize(("kind", "held", "read", "changed"), sampled(CASES, ALWAYS))
def test_what_is_read_is_watched_and_nothing_else(kind, held, read, changed, tmp_path, monkeypatch):
    case = kind, held, read, changed
    module, names = build(kind, held, read, tmp_path, monkeypatch)
    x = torch.ones(2)
    wanted = module(x)
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), wanted)
    assert stats(module).hits == 1, dict(stats(module).misses)
    module.unread = names["USER"]["UNREAD"] = names["USED"]["UNREAD"] = 1
    if ROWS[kind].is_plain:
        act(case, 2.0, names)
    torch.testing.assert_close(module(x), wanted)
    assert stats(module).hits == 2, dict(stats(module).misses)
    in_place = changed != "assignment" and ROWS[kind].change
    change = partial(act, case, None if in_place else 3.0, names)
    if changed == "another thread" and kind not in OF_THREADS:
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()
    else:
        change()
    now = module.forward(x)
    torch.testing.assert_close(module(x), now)
    assert not torch.equal(now, wanted), "the change is one that eager sees"
    assert stats(module).hits + sum(stats(module).misses.values()) == 3


class Looking(torch.nn.Module):
    def __init__(self, look):
        super().__init__()
        self.h, self.look = torch.ones(2), look

    def forward(self, x):
        return x * self.look(self.h)


@pytest.mark.parametrize(
    ("look", "other"),
    [
        (lambda h: float(h.shape[0]), torch.zeros(2)),
        (lambda h: 2.0 + (h.dtype is torch.float64), torch.zeros(2)),
        (lambda h: 2.0 if h is not None else 3.0, torch.zeros(5)),
    ],
    ids=["shape", "dtype", "is None"],
)
def test_another_tensor_that_looks_the_same_to_forward_hits(look, other):
    module, x = Looking(look), torch.ones(2)
    add_tvm_dispatch(module, x)
    module(x)
    module.h = other
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 2, dict(stats(module).misses)
