"""State that forward reads, in its file and in an installed package: changed, the next call is eager's."""

from __future__ import annotations

import decimal
import importlib
import os
import sys

import pytest
import torch

from bridge import UnsupportedModule, add_tvm_dispatch, stats

HEAD = """
import collections, contextlib, contextvars, copy, ctypes, dataclasses, decimal, enum, functools, gc, importlib, inspect
import io, itertools, json, logging, multiprocessing, operator, os, queue, sys, threading, types, weakref
import xml.etree.ElementTree as ET
import numpy as np, torch
from torch import nn
from types import SimpleNamespace as NS
class Cfg:
    def __init__(self, **held): self.__dict__.update(held)
    def get(self): return self.k
"""
CHANGED = """
getmembers of a new object: class C: k = 2. | dict(inspect.getmembers(C()))['k'] | C.k = 3.
module's computed name: D = types.ModuleType('d'); D.v = type('KK', (), {}); H = [D]
  | float(len(getattr(H[0], chr(118)).__name__)) | D.v.__name__ = 'KKK'
slice of a list: H = [2.] | H[:1][0] | H[0] = 3.
computed key: H = {'k1': 2.} | H[f'k{1}'] | H['k1'] = 3.
key by str(): H = {'1': 2.} | H[str(1)] | H['1'] = 3.
key by a class's text: class C: pass~H = {str(C): 2.} | H[str(C)] | H[str(C)] = 3.
key by an object's class: class C: pass~O = C(); H = {str(C): 2.} | H.get(str(type(O)), 3.) | H.clear()
key by a class's name: class C: pass~O = C(); H = {'C': 2.} | H[O.__class__.__name__] | H['C'] = 3.
key by another name: class C: pass~H = {str(C): 2.} | H.get(str(C), 3.) | C.__qualname__ = 'D'
key by another module: class C: pass~H = {str(C): 2.} | H.get(f'{C}', 3.) | C.__module__ = 'd'
member of a set: H = {'a', 'b'} | 2. + ('b' in H) | H.discard('b')
class in a set: class C: pass~H = {C}~def f(k): return 2. + (k in H) | f(C) | H.clear()
no member of a frozen set: H = frozenset('ab')~def f(k): return 2. + (k not in H) | f('c') | H = frozenset('abc')
number in a set: H = {1, 2}~def f(k): return 2. + (k + 1 in H) | f(1) | H.remove(2)
class in a dictionary: class C: pass~H = {C: 1}~def f(k): return 2. + (k in H) | f(C) | del H[C]
computed member of a list: H = ['k1']~def f(k): return 2. + (f'k{k}' in H) | f(1) | H[0] = 'k2'
member of either: A, B = {'a'}, {'b'}~def f(k): return 2. + (k in (A if k else B)) | f('a') | A.clear()
text of a class: class C: pass~O = C() | 2. if 'C' in str(type(O)) else 3. | C.__qualname__ = 'D'
key by the text of a result: H = {'8': 2.} | H.get(str(int('8')), 3.) | H['8'] = 4.
view held: D = {'k': [2.]}; H = D.values() | next(iter(H))[0] | D['k'][0] = 3.
proxy of a class: class C: k = 2. | C.__dict__['k'] | C.k = 3.
late in a proxy: class C: pass | 2. + ('late' in C.__dict__) | C.late = 1
over the mro: class B: k = 2.~class C(B): pass | [c.__dict__['k'] for c in C.__mro__ if 'k' in c.__dict__][0] | B.k = 3.
default_factory: H = collections.defaultdict(lambda: 2.) | H.copy()['k'] | H.default_factory = lambda: 3.
equal namespaces: H = NS(k=2.) | 2. if H == NS(k=2.) else 3. | H.k = 3.
shown over the base: class B: k = 3.~class C(B): k = 2.~H = C() | [h.k for h in [H]][0] | del C.k
enum iterated: class E(enum.Enum): A = 1~E.A.k = 2. | sum(e.k for e in E) | E.A.k = 3.
metaclass's dictionary: class Me(type): d = {'k': 2.}~class C(metaclass=Me): pass | C.d['k'] | Me.d['k'] = 3.
bound __getattribute__: H = NS(k=2.).__getattribute__ | H('k') | H.__self__.k = 3.
attrgetter: H = NS(a=NS(k=2.)) | operator.attrgetter('a.k')(H) | H.a.k = 3.
methodcaller held: D = {'k': 2.}; H = operator.methodcaller('get', 'k') | H(D) | D['k'] = 3.
partial of getattr: O = NS(k=2.); H = functools.partial(getattr, O, 'k') | H() | O.k = 3.
partial of dict.get: D = {'k': 2.}; H = functools.partial(dict.get, D) | H('k') | D['k'] = 3.
getattr down a path: H = NS(a=NS(b=NS(k=2.))) | functools.reduce(getattr, 'a.b'.split('.'), H).k | H.a.b.k = 3.
generator gives objects: H = [NS(k=2.)]~def all_of(): yield from H | [h.k for h in all_of()][0] | H[0].k = 3.
pair of a comprehension: H = {'q': np.array([[2.], None], object)}
  | {n: h[0][0] for n, h in H.items()}['q'] | H['q'][0][0] = 3.
queue's size: H = queue.SimpleQueue() | 2. + H.qsize() | H.put(1)
event: def f(): pass~f.e = threading.Event() | 2. + f.e.is_set() | f.e.set()
event of processes: H = [multiprocessing.Event()] | 2. + H[0].is_set() | H[0].set()
semaphore of processes: H = multiprocessing.Semaphore(2) | float(H.get_value()) | H.release()
pointer: V = ctypes.c_double(2.); H = ctypes.pointer(V) | H[0] | V.value = 3.
element: H = ET.fromstring('<a k="2"/>') | (lambda h: float(h.get('k')))(*[H]) | H.set('k', '3')
child element: H = [ET.fromstring('<a><b>2</b></a>')] | float(H[0].find('b').text) | H[0][0].text = '3'
structured scalar: H = np.array([(1, 2.)], [('a', int), ('k', float)])[0] | float(H['k']) | H['k'] = 3.
may be written: H = {'a': np.ones(1)} | [2. + h.flags.writeable for h in H.values()][0] | H['a'].flags.writeable = False
polynomial: H = np.poly1d([2.]) | float(H(1.)) | H.coeffs[0] = 3.
property of another class: class A: k = property(lambda s: 2.)~class B: k = property(lambda s: 3.)~H = A()
  | H.k | H.__class__ = B
item of another class: class A: __getitem__ = lambda s, i: 2.~class B: __getitem__ = lambda s, i: 3.~H = A()
  | H[0] | H.__class__ = B
isinstance: class A: pass~class B: pass~H = A() | 2. + isinstance(H, B) | H.__class__ = B
type(): class A: pass~class B: pass~H = A() | 2. + (type(H) is B) | H.__class__ = B
dictionary assigned: H = Cfg(k=2.) | H.get() | H.__dict__ = {'k': 3.}
dictionary read: H = Cfg(k=2.) | H.__dict__['k'] | H.k = 3.
flags in a dictionary: class F:~    def __init__(s): s.__dict__['_v'] = {'k': 2.}
  ~    def __getattr__(s, n): return s.__dict__['_v'][n]~H = F()
  | H.k | H._v['k'] = 3.
borg: class S:~    _st = {'k': 2.}~    def __init__(s): s.__dict__ = s._st | S().k | S().k = 3.
all is computed: class A:~    d = {'k': 2.}~    def __getattribute__(s, n): return A.d[n]~H = A() | H.k | A.d['k'] = 3.
single dispatch: @functools.singledispatch~def f(k): return 2. | f(1) | f.register(int, lambda k: 3.)
context held: V = contextvars.ContextVar('v', default=2.); C = contextvars.copy_context()
  | C.run(V.get) | C.run(V.set, 3.)
token reset: V = contextvars.ContextVar('v', default=3.); T = V.set(2.) | V.get() | V.reset(T)
decimals: | float(decimal.Decimal(2) / decimal.Decimal(3)) | decimal.getcontext().prec = 2
own decimals: C = decimal.Context(prec=2) | float(C.sqrt(decimal.Decimal(2))) | C.prec = 3
list of a thread: L = threading.local(); L.k = [2.] | [h.k[0] for h in (L,)][0] | L.k[0] = 3.
dictionary of a thread: L = threading.local(); L.d = {'k': 2.} | L.__dict__['d']['k'] | L.d['k'] = 3.
reference dies: T = [Cfg()]; H = weakref.ref(T[0]) | 2. + (H() is None) | T.clear(); gc.collect()
read, then it dies: T = [Cfg(k=2.)]; H = weakref.ref(T[0]) | getattr(H(), 'k', 3.) | T.clear(); gc.collect()
method dies: T = [Cfg(k=2.)]; H = weakref.WeakMethod(T[0].get) | 2. + (H() is None) | T.clear(); gc.collect()
weak value dies: T = [Cfg(k=2.)]; H = weakref.WeakValueDictionary(a=T[0])
  | 2. + ('a' not in H) | T.clear(); gc.collect()
weak values: T = Cfg(k=2.); H = weakref.WeakValueDictionary(a=T) | sum(v.k for v in H.values()) | T.k = 3.
weak key: T = Cfg(); H = weakref.WeakKeyDictionary(); H[T] = 2. | H[T] | H[T] = 3.
weak set: T = Cfg(k=2.); H = weakref.WeakSet([T]) | sum(t.k for t in H) | T.k = 3.
reference replaced: A = Cfg(k=2.); B = Cfg(k=3.); H = weakref.ref(A) | H().k | H = weakref.ref(B)
super: class B:~    k = 2.~class C(B):~    k = 5.~    def get(s): return super().k~H = C() | H.get() | B.k = 3.
super().__getattribute__: class C:
  ~    def __getattribute__(s, n): return super().__getattribute__({'j': 'k'}.get(n, n))~H = C(); H.k = 2.
  | H.j | H.k = 3.
module, computed name: MOD = types.ModuleType('m'); MOD.G1 = 2. | getattr(MOD, 'G' + str(1)) | MOD.G1 = 3.
late __getattr__ of a module: MOD = types.ModuleType('m') | getattr(MOD, 'k9', 2.) | MOD.__getattr__ = lambda n: 3.
__import__: K = 2. | __import__(__name__).K | K = 3.
compiled expression: G = 2.; C = compile('G', 'c', 'eval') | eval(C) | G = 3.
inspect: class C: k = 2. | inspect.getattr_static(C, 'k') | C.k = 3.
members: C = NS(k=2.) | dict(inspect.getmembers(C))['k'] | C.k = 3.
defaults of __new__: NT = collections.namedtuple('NT', 'k', defaults=(2.,)) | NT().k | NT.__new__.__defaults__ = (3.,)
import that fails: def f():~    try:~        import tests_late_name~        return 3.~    except ImportError: return 2.
  | f() | sys.modules['tests_late_name'] = types
default of nested getattr: H = NS(a=NS()) | getattr(getattr(H, 'a', None), 'late', 2.) | H.a.late = 3.
late __bool__: class C: pass~H = C() | 2. if H else 3. | C.__bool__ = lambda s: False
late __len__: class C: pass~H = C() | 2. if H else 3. | C.__len__ = lambda s: 0
late __eq__: class C: pass~H = C() | 2. + (H == 5) | C.__eq__ = lambda s, o: True
late __getattribute__: class C: k = 2.~H = C() | H.k | C.__getattribute__ = lambda s, n: 3.
late __iter__: class C:~    def __getitem__(s, i): return [2.][i]~H = C() | sum(H) | C.__iter__ = lambda s: iter([3.])
late __contains__: class C: __iter__ = lambda s: iter([1])~H = C() | 2. + (7 in H) | C.__contains__ = lambda s, k: True
singleton of a metaclass: class Me(type):~    held = {}
  ~    def __call__(c): return c.held.get(c) or c.held.setdefault(c, super().__call__())
  ~class S(metaclass=Me): pass~S().k = 2.
  | S().k | S().k = 3.
factory that caches: @functools.lru_cache~def get(n): return NS(k=2.)~get('a') | get('a').k | get('a').k = 3.
factory by keyword: @functools.cache~def get(n): return NS(k=2.)~get(n='a') | get(n='a').k | get(n='a').k = 3.
factory not called before: @functools.lru_cache~def get(): return NS(k=2.) | get().k | get().k = 3.
static factory: class F:~    @staticmethod~    @functools.lru_cache~    def get(): return NS(k=2.)~F.get()
  | F.get().k | F.get().k = 3.
class's factory: class F:~    @classmethod~    @functools.lru_cache~    def get(c): return NS(k=2.)~F.get()
  | F.get().k | F.get().k = 3.
object's factory: class F:~    @functools.lru_cache~    def get(s): return NS(k=2.)~H = F(); H.get()
  | H.get().k | H.get().k = 3.
cache is older: D = {'k': 2.}~@functools.cache~def get(): return D['k']~get(); D['k'] = 5.
  | get() | get.cache_clear(); D['k'] = 3.
module from importlib: def get(): return importlib.import_module(__name__).__dict__['Q']~Q = NS(k=2.)
  | get().k | Q.k = 3.
another tensor: T = torch.ones(3, 4) | 2. + (x is T) | m.given = T
another tensor in a dictionary: D = {'a': torch.ones(3, 4)} | 2. + (x is D['a']) | m.given = D['a']
copied: H = NS(k=[2.]) | copy.deepcopy(H).k[0] | H.k[0] = 3.
cache held by an object: L = [NS(k=2.)]; H = NS(f=functools.lru_cache(functools.partial(operator.getitem, L)))
  | H.f(0).k | L[0].k = 3.
cache of a singleton in a loop: class One:~    made = None
  ~    def __new__(c): c.made = c.made or object.__new__(c); return c.made
  ~L = [NS(k=2.)]; One().held = functools.lru_cache(functools.partial(operator.getitem, L))
  ~def read():~    for o in (One().held,): return o(0).k
  | read() | L[0].k = 3.
static partial: P = functools.partial(lambda k: k, NS(k=2.))~class C: get = staticmethod(P)~H = C()
  | [h.get().k for h in (H,)][0] | P.args[0].k = 3.
iterator of one's own: class C: __iter__ = lambda s: iter([s.held])~H = C()
  ~H.held = types.ModuleType('t'); H.held.k = 2. | [*H][0].k | H.held.k = 3.
attribute of a method's function: class C:~    def f(s): return 0~    f.k = [2.]~H = C()
  | getattr(H.f, chr(107))[0] | C.f.k[0] = 3.
cache held in a container: L = [2.]
  ~U = collections.UserDict(f=functools.lru_cache(functools.partial(operator.getitem, L)))
  | U['f'](0) | L[0] = 3.; U['f'].cache_clear()
variable around a method: def cell(k):~    def get(): return k~    def put(v):~        nonlocal k; k = v
  ~    return get, put~F, PUT = cell(2.)~class C: get = F~H = C()
  | getattr(H, chr(103) + 'et').__closure__[0].cell_contents | PUT(3.)
method's attribute passed on: class C:~    def f(s): return 0~    f.k = NS(v=2.)~H = C()
  | (lambda f: f.k.v)(H.f) | C.f.k.v = 3.
pairs of a list of its own: H = collections.UserList([NS(k=[2.]), 1]) | list(zip(H, H))[0][1].k[0] | H[0].k[0] = 3.
numbered entries: H = collections.UserList([NS(k=[2.])]) | dict(enumerate(H))[0].k[0] | H[0].k[0] = 3.
sorted items: H = collections.UserDict(a=NS(k=[2.])) | sorted(H.items())[0][1].k[0] | H['a'].k[0] = 3.
grouped: H = collections.UserList([NS(k=[2.])])
  | [*list(itertools.groupby(H, type))[0][1], *map(list, zip(H))][0][0].k[0] | H[0].k[0] = 3.
one of many in a list: A = [[0.] for _ in range(40)]; A[33][0] = 2.
  | [A[0], A[1], A[2], A[3], A[4], A[5], A[6], A[7], A[8], A[9], A[10], A[11], A[12], A[13], A[14], A[33]][15][0]
  | A[33][0] = 3.
one of many branches: A = [[0.] for _ in range(40)]; A[33][0] = 2.; W = 14
  ~def f():~    h = A[0]~    if W == 1: h = A[1]~    elif W == 2: h = A[2]~    elif W == 3: h = A[3]
  ~    elif W == 4: h = A[4]~    elif W == 5: h = A[5]~    elif W == 6: h = A[6]~    elif W == 7: h = A[7]
  ~    elif W == 8: h = A[8]~    elif W == 9: h = A[9]~    elif W == 10: h = A[10]~    elif W == 11: h = A[11]
  ~    elif W == 12: h = A[12]~    elif W == 13: h = A[13]~    elif W == 14: h = A[33]~    return h[0]
  | f() | A[33][0] = 3.
list of linked objects: H = None~for i in range(60): H = NS(k=1., n=H)~T = H.n.n~for i in range(50): T = T.n
  ~def f():~    h, t = H, 0.~    while h is not None:~        t, h = t + h.k, h.n~    return t
  | f() | T.k = 50.
two lists that are linked: A = NS(k=2., n=None); B = NS(k=1., n=A); A.n = None; C = NS(k=1., n=B)
  ~def f():~    a = C~    while a.n is not None:~        b = a.n~        a = b~    return a.k
  | f() | A.k = 3.
far below: H = NS(a=[2.])~for i in range(39): H = NS(a=H)~T = H~for i in range(39): T = T.a
  | H.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a[0] | T.a[0] = 3.
method in a variable: H = {'k': [2.]}~def f():~    get = H.get~    return get('k')[0] | f() | H['k'][0] = 3.
receiver in a variable: H = {'k': 2.}~def f():~    get = H.get~    return get.__self__['k'] | f() | H['k'] = 3.
array of objects: H = np.array([NS(k=2.)], object) | [h.k for h in H][0] | H[0].k = 3.
text of fields: H = NS(k=2.) | float(f'{H}'[12:-1]) | H.k = 3.
repr() of fields: H = [NS(k=2.)] | float(repr(H)[13:-2]) | H[0].k = 3.
mapped to text: H = [NS(k=2.)] | float([*map(str, H)][0][12:-1]) | H[0].k = 3.
fields compared: H = NS(k=2.); L = [NS(k=3.)] | 2. + L.count(H) | H.k = 3.
chained: H = [[NS(k=2.)]] | [*itertools.chain(*H)][0].k | H[0][0].k = 3.
walk with a queue: H = NS(v=1., c=[NS(v=2., c=[NS(v=3., c=[])])])
  ~def f():~    q, t = collections.deque([H]), 0.
  ~    while q:~        h = q.popleft()~        t += h.v~        q.extend(h.c)~    return t
  | f() | H.c[0].c[0].v = 7.
cache over C: L = [{'k': 2.}]; H = functools.lru_cache(functools.partial(operator.getitem, L))
  | H(0)['k'] | L[0] = {'k': 3.}; H.cache_clear()
one of many results: L = [NS(k=1.) for _ in range(200)]~def get(i): return L[i]
  | sum(get(i).k for i in range(200)) | L[170].k = 3.
one of many that C gives: L = [NS(k=1.) for _ in range(200)]
  ~def f():~    q, t = collections.deque(L), 0.~    while q:~        h = q.popleft()~        t += h.k~    return t
  | f() | L[170].k = 3.
dictionary of what a comprehension gives: L = threading.local(); L.k = [2.]
  ~H = collections.UserDict(v=collections.defaultdict(int, v=L), w=1)
  | dict([b for a, b in H.items()][0])['v'].k[0] | L.k = [3.]
table in a table: H = {i: [float(i)] * 3 for i in range(90)} | 2. + sum(v[1] for v in H.values()) | H[70][1] = 3.
key of a table: H = {f'k{i}': float(i) for i in range(90)} | sum(H.values()) | H['k70'] = 3.
process group: | 2. + torch.distributed.is_initialized()
  | torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
number of a class of its own: class F(float): pass~H = F(2.) | H * 1. | H = F(3.)
text of a class of its own: class S(str): pass~H = S('2') | float(H) | H = S('3')
special method that torch calls: class C:~    k = 1~    def __index__(s): return s.k~H = C()
  | torch.tensor([2., 3., 5.])[H:][0] | H.k = 2
sequence that torch reads: H = collections.UserList([2.]) | torch.tensor(H)[0] | H.data[0] = 3.
object that stands for a number: class C:
  ~    k = 2.
  ~    @classmethod
  ~    def __torch_function__(c, f, t, a=(), w=None): return f(*[c.k if type(i) is c else i for i in a])
  ~H = C() | torch.mul(torch.ones(()), H) | C.k = 3.
match of a buffer: B = bytearray(b'2'); import re~H = re.match(b'.', B) | float(H[0]) | B[:] = b'3'
annotations of a function: import typing~def f(a: int): pass
  | 1. + len(typing.get_type_hints(f)) | f.__annotations__['b'] = int
signature of a function: def f(a): pass
  | 1. + len(inspect.signature(f).parameters) | f.__signature__ = inspect.Signature()
checks of distributions: | 2. + torch.distributions.Distribution._validate_args
  | torch.distributions.Distribution.set_default_validate_args(False)
attribute by a number in its name: H = NS(w0=2., w1=1.) | sum(getattr(H, f'w{i}') for i in range(2)) | H.w0 = 3.
attribute by two parts of its name: H = NS(w0_1=2.)
  ~def f(a, b): return getattr(H, f'w{a}_{b}') | f(0, 1) | H.w0_1 = 3.
attribute by another str: H = NS(w0=2., w1=1.)~str = lambda i: '0' | getattr(H, 'w' + str(1)) | H.w0 = 3.
matched inside of an entry: H = {'a': [NS(k=2.)]}~def f():~    match H:~        case {'a': [NS(k=k)]}: return k
  | f() | H['a'][0].k = 3.
class of an exception: class E(Exception): k = 2.~def f():~    try: raise E()~    except Exception as e: return e.k
  | f() | E.k = 3.
exception of a helper: class E(Exception): pass~class D(E): k = 2.~def g(): raise D()
  ~def f():~    try: g()~    except E as e: return e.k
  | f() | D.k = 3.
exception kept: H = Exception(); H.k = 2.~def g(h): raise h~def f(h):~    try: g(h)
  ~    except Exception as e: return e.k
  | f(H) | H.k = 3.
late truth of a class: class Me(type): pass~class C(metaclass=Me): pass
  | 2. if C else 3. | Me.__bool__ = lambda c: False
late comparison of classes: class Me(type): pass~class C(metaclass=Me): pass~class D(metaclass=Me): pass
  | 2. + (C == D) | Me.__eq__ = lambda c, o: True
late operator of a float: class C(float): pass~H = C(2.) | H * 1. | C.__mul__ = lambda s, o: 3.
late sign of an int: class C(int): pass~H = C(2) | abs(H) * 1. | C.__abs__ = lambda s: 3
late text operator: class C(str): pass~H = C('2') | float(H + '0') | C.__add__ = lambda s, o: '3'
late reflected operator: class A:~    def __add__(s, o): return 2.~class C(A): pass~H = A(), C()
  | H[0] + H[1] | C.__radd__ = lambda s, o: 3.
late comparison: class A:~    def __gt__(s, o): return True~class C: pass~H = C()
  | 2. + (H < A()) | C.__lt__ = lambda s, o: 0
late operator of a new object: class A: __add__ = lambda s, o: 2.~class C(A): pass
  | C() + 1. | C.__add__ = lambda s, o: 3.
place of a list's iterator: H = iter([1, 2, 3]) | 2. + operator.length_hint(H) | next(H)
iterator copied: H = iter([2., 3.]) | next(copy.copy(H)) | next(H)
numbers of an iterator: H = enumerate('ab') | 2. + H.__reduce__()[1][1] | next(H)
frame of a generator: def g():~    k = 2.~    while True:~        yield k~        k += 1.~H = g(); next(H)
  | H.gi_frame.f_locals['k'] | next(H)
state of a generator: def g(): yield 1~H = g() | 2. + (inspect.getgeneratorstate(H) == 'GEN_CREATED') | next(H)
future: H = torch.futures.Future(); H.set_result(2.) | H.wait() | H = torch.futures.Future(); H.set_result(3.)
future that gets a value: H = torch.futures.Future() | 2. + (H.value() if H.done() else 0.) | H.set_result(3.)
file by lines: import linecache~K = 'tests_lines'; linecache.cache[K] = (1, None, ['2'], K)
  | float(linecache.getline(K, 1)) | linecache.cache[K] = (1, None, ['3'], K)
format_map: H = NS(d={'k': 2}) | float('{k}'.format_map(getattr(H, 'd'))) | H.d['k'] = 3
key that is None: D = {None: 2.}~def g(): return None~def f():~    key = g()~    return D[key]
  | f() | D[None] = 3.
key that is None at last: D = {1: 1., None: 2.}~def g(i): return None if i else 1~def f():~    k = 1.
  ~    for i in range(2):~        k = k * D[g(i)]~    return k
  | f() | D[None] = 3.
files by their place: import tempfile~P = [tempfile.mkstemp()[1] for _ in 'ab']~def f():~    k = 2.
  ~    for i in range(2): k = k + os.stat(P[i]).st_size~    return k
  | f() | with open(P[1], 'a') as o: o.write('more')
files mapped: import tempfile~P = [tempfile.mkstemp()[1] for _ in 'ab']
  | 2. + sum(s.st_size for s in map(os.stat, P)) | with open(P[1], 'a') as o: o.write('more')
context variables mapped: V = [contextvars.ContextVar('v', default=2.)]
  | sum(map(contextvars.ContextVar.get, V)) | V[0].set(3.)
context variables as keys: V = [contextvars.ContextVar('a', default=2.), contextvars.ContextVar('b', default=1.)]
  | 1. + (max(V, key=contextvars.ContextVar.get).name == 'a') | V[1].set(3.)
context variable's new default: V = contextvars.ContextVar('v') | V.get({'k': 2.})['k'] | V.set({'k': 3.})
key that an attribute of a class gives: class C: k = 'a'~D = {'a': 2.} | D[str(getattr(C, 'k'))] | D['a'] = 3.
attributes mapped: class C: pass~H = C(); H.k = 2. | sum(map(operator.attrgetter('k'), [H])) | H.k = 3.
attributes by getattr, mapped: class C: pass~H = C(); H.k = 2. | sum(map(getattr, [H], ['k'])) | H.k = 3.
attributes of stars, mapped: class C: pass~H = C(); H.k = 2. | sum(itertools.starmap(getattr, [(H, 'k')])) | H.k = 3.
attributes that group: class C: pass~H = C(); H.k = 2.
  | next(itertools.groupby([H], operator.attrgetter('k')))[0] | H.k = 3.
keyword of a partial: L = [NS(k=2., r=5.), NS(k=1., r=6.)]
  | functools.partial(max, L, key=operator.attrgetter('k'))().r | L[1].k = 3.
partial of an attrgetter: H = NS(k=2.); J = functools.partial(operator.attrgetter('k'), H) | J() | H.k = 3.
"""
HITS = """
copy of the environment: | float(len(dict(os.environ)) > 0) | pass
other table: H = {f'k{i}': float(i) for i in range(90)}; J = dict(H) | sum(H.values()) | J['k1'] = 3.
equal table: H = {f'k{i}': float(i) for i in range(90)} | sum(H.values()) | H['k1'] = float('1')
handler that keeps records: class Keeps(logging.Handler):
  ~    def emit(s, r): s.held.append(r.getMessage())
  ~LOG = logging.Logger('tests.keeps'); H = Keeps(); H.held = []; LOG.addHandler(H)
  ~def f():~    LOG.warning('told %s', len(LOG.handlers))~    return 2.
  | f() | H.held.append('more')
other attribute: H = Cfg(k=2., other=1) | H.get() | H.other = 2
other attribute, in a dictionary: H = Cfg(k=2., other=1) | H.__dict__['k'] | H.other = 2
other attribute, tested and passed: H = NS(k=2., other=1) | (lambda c: c.k if c else 3.)(H) | H.other = 2
other attribute by a reference: T = Cfg(k=2., step=0); H = weakref.ref(T) | H().k | T.step = 1
other slot: class S: __slots__ = ('k', 'step')~H = S(); H.k = 2.; H.step = 0 | H.k | H.step = 1
other key: D = {'k': 2., 'j': 1} | D.get('k') | D['j'] = 2
other key than a class's text: class C: pass~D = {str(C): 2.} | D.get(str(C)) | D['j'] = 2
other key than an object's class: class C: pass~O = C(); D = {str(C): 2.} | D.get(str(type(O))) | D['j'] = 2
other key than a class's name: class C: pass~O = C(); D = {'C': 2.} | D[O.__class__.__name__] | D['j'] = 2
other key of a registry: class R(dict):~    def get(self, of): return super().get(str(of.__class__)) or 3.
  ~class C: pass~O = C(); D = R({str(C): 2.}) | D.get(O) | D['j'] = 2
other member of a set: H = {'a', 'b'} | 2. + ('b' in H) | H.add('c')
other class in a set: class C: pass~H = {C}~def f(k): return 2. + (k in H) | f(C) | H.add(int)
other class in a dictionary: class C: pass~H = {C: 1}~def f(k): return 2. + (k in H) | f(C) | H[int] = 1
registered before: H = {'a'}~def f(k):~    if k in H: return 2.~    H.add(k)~    return 2.
  | f('a') | H.add('b')
other key, behind a proxy: D = {'k': 2.}; H = types.MappingProxyType(D) | H['k'] | D['j'] = 2
other name of a class: class C: k = 2. | C.__dict__['k'] | C.z = 1
other of a thread: L = threading.local(); L.k = 2. | L.k | L.z = 1
other context variable: V = contextvars.ContextVar('v', default=2.); W = contextvars.ContextVar('w')
  | V.get() | W.set(1)
set and reset: V = contextvars.ContextVar('v', default=2.) | V.get() | V.reset(V.set(3.))
other event: A = threading.Event(); B = threading.Event() | 2. + A.is_set() | B.set()
other environment variable: | float(os.environ.get('TESTS_YY', '2')) | os.environ['TESTS_ZZ'] = '1'
other level: H = logging.getLogger('tests.hit.a')
  | 2. + H.isEnabledFor(10) | logging.getLogger('tests.hit.b').setLevel(10)
other module: | 2. + ('tests_no' in sys.modules) | sys.modules['tests_other'] = types
equal array: H = np.array([2.]) | float(H[0]) | H = np.array([2.])
equal time: import datetime; H = datetime.datetime(2020, 1, 2) | float(H.day) | H = datetime.datetime(2020, 1, 2)
equal deque: H = collections.deque([2.]) | H[0] | H = collections.deque([2.])
equal set: H = {1, 2} | float(len(H)) | H = {2, 1}
equal with slots: @dataclasses.dataclass(slots=True)~class C: k: float = 2.~H = C() | H.k | H = C()
equal scalar of NumPy's: H = NS(a=np.float32(2.)) | float(H.a) | H.a = np.float32(2.)
other name with a number: H = NS(w0=2., w1=1., z=1) | sum(getattr(H, f'w{i}') for i in range(2)) | H.z = 2
other name by str: H = NS(w0=2., z=1)~def f(n): return getattr(H, 'w' + str(n)) | f(0) | H.z = 2
other name in a variable: H = NS(w0=2., z=1)~def f(n):~    name = f'w{n}'~    return getattr(H, name) | f(0) | H.z = 2
isinstance of a list: H = [1] | 2. + isinstance(H, list) | H.append(2)
lock tried: H = threading.Lock()~def f():~    if H.acquire(timeout=1): H.release()~    return 2. | f() | pass
lock of processes: H = multiprocessing.RLock()~def f():~    H.acquire()~    try: return 2.~    finally: H.release()
  | f() | pass
set and reset in forward: V = contextvars.ContextVar('v', default=2.)~def f():~    t = V.set(5.)
  ~    try: return V.get() - 3.~    finally: V.reset(t)
  | f() | pass
lock: H = threading.Lock()~def f():~    with H: return 2. | f() | H.acquire(); H.release()
lock that its thread may take again: H = threading.RLock()~def f():~    with H: return 2. | f() | pass
condition: H = threading.Condition()~def f():~    with H: return 2. | f() | pass
queue: H = queue.Queue() | 2. + H.qsize() | pass
cache filled by others: @functools.lru_cache~def f(n): return n | float(f(2)) | f(2); f(3)
factory filled by others: @functools.lru_cache~def get(): return NS(k=2.) | get().k | get()
lazy singleton: H = None~def get():~    global H~    H = H or NS(k=2.)~    return H | get().k | pass
single dispatch: @functools.singledispatch~def f(k): return 2. | f(1) | pass
missing import: def f():~    try:~        import tests_never_there~        return 3.~    except ImportError: return 2.
  | f() | pass
is_initialized: | 2. + torch.distributed.is_available() * torch.distributed.is_initialized() | pass
nothing of decimals: | float(decimal.Decimal(2) / 1) | decimal.Decimal(1) / 3
"""
REFUSED = """
memory at an address: V = ctypes.c_double(2.); A = ctypes.addressof(V)
  | ctypes.c_double.from_address(A).value | memory by its address
pointer to an address: V = ctypes.c_double(2.); A = ctypes.addressof(V)
  | ctypes.cast(A, ctypes.POINTER(ctypes.c_double))[0] | memory by its address
foreign function: L = ctypes.CDLL(None) | 2. + bool(L.getenv(b'TESTS_YY')) | a library in C
weak references to an object: class C: pass~H = C() | 2. + weakref.getweakrefcount(H) | other objects of the process
holders of an object: H = NS() | 2. + len(gc.get_referrers(H)) | other objects of the process
file of an unknown name: | 2. + sum(os.access(*a) for a in [('tests_no', 0)]) | not known before the call
the system's random numbers: | 2. + (os.urandom(1) == b'a') | on chance
lock that stays acquired: H = threading.RLock() | 2. + H.acquire() | leaves it so
lock that is released: H = threading.Lock(); H.acquire() | (H.release(), 2.)[1] | leaves it so
semaphore of processes: H = multiprocessing.Semaphore(2) | 2. + H.acquire() | leaves it so
event of processes: H = multiprocessing.Event() | (H.set(), 2.)[1] | changes files, the process
token of before: V = contextvars.ContextVar('v'); T = [V.set(2.)]
  | (V.reset(T.pop()), 2.)[1] | resets a context variable
error at the second call: L = [1] | 1. + L.pop() | forward changes at every call
copied generator: import random; H = random.Random(1) | copy.copy(H).random() | a generator that is not torch's
"""


def cases(text):
    """``name: definitions | forward's factor | the change``, where ``~`` ends a line."""
    return dict(line.split(": ", 1) for line in text.strip().replace("\n  |", " |").replace("\n  ~", "~").split("\n"))


def module_of(case, where, path, monkeypatch):
    """A module whose forward reads as a case says, its namespace, and the code and the namespace of the change."""
    before, value, change = (part.strip().replace("~", "\n") for part in case.split("|"))
    package = f"read_{where}_{path.name}"
    folder = path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    shown = f"{before}\ndef value(x): return {value}\n"
    (folder / f"{package}.py").write_text(HEAD + (shown if where == "package" else ""))
    read = f"{package}.value(x)" if where == "package" else value
    forward = f"class M(nn.Module):\n    def forward(self, x): return self.linear(x) * ({read})\n"
    (path / f"user_{package}.py").write_text(
        HEAD + f"import {package}\n" + (before if where == "file" else "") + "\n" + forward
    )
    monkeypatch.syspath_prepend(str(path))
    user = importlib.import_module(f"user_{package}")
    module = user.M()
    module.linear = torch.nn.Linear(4, 4)
    return module, (user if where == "file" else sys.modules[package]).__dict__, change


WHERE = ["file", "package"]


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    before, context = set(sys.modules), decimal.getcontext().copy()
    yield
    decimal.setcontext(context)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in set(sys.modules) - before:
        if name.startswith(("tests_", "read_", "user_")):
            del sys.modules[name]
    torch.distributions.Distribution.set_default_validate_args(__debug__)
    for name in ("TESTS_YY", "TESTS_ZZ"):
        os.environ.pop(name, None)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", cases(CHANGED).values(), ids=cases(CHANGED))
def test_what_changed_is_seen(case, where, tmp_path, monkeypatch):
    module, space, change = module_of(case, where, tmp_path, monkeypatch)
    x = torch.randn(3, 4)
    wanted, factor = module(x), module(x) / module.linear(x)
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), wanted)
    assert stats(module).hits == 1, dict(stats(module).misses)
    module.given = x
    exec(change, space, {"m": module} if "m.given" in change else None)
    x = module.given
    now = module.forward(x)
    torch.testing.assert_close(module(x), now)
    assert stats(module).hits == 1 and stats(module).misses
    assert not torch.allclose(now, module.linear(x) * factor), "the change is one that eager sees"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", cases(HITS).values(), ids=cases(HITS))
def test_what_did_not_change_hits(case, where, tmp_path, monkeypatch):
    module, space, change = module_of(case, where, tmp_path, monkeypatch)
    x = torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    module(x)
    exec(change, space)
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 2, dict(stats(module).misses)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", cases(REFUSED).values(), ids=cases(REFUSED))
def test_what_cannot_be_watched_is_refused(case, where, tmp_path, monkeypatch):
    module, _, reason = module_of(case, where, tmp_path, monkeypatch)
    with pytest.raises(UnsupportedModule, match=reason):
        add_tvm_dispatch(module, torch.randn(3, 4), whole=True)


class Flagged(torch.nn.Module):
    def forward(self, x):
        return x * (2 if self.training else 3)


@pytest.mark.parametrize("change", ["saved buffers", "no flag of its own"])
def test_changes_of_a_module_in_the_tree_are_seen(change, monkeypatch):
    class M(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.flagged = torch.nn.Linear(4, 4), Flagged()
            self.linear.register_buffer("extra", torch.ones(1))

        def forward(self, x):
            return self.flagged(self.linear(x)) * (1 + len(self.state_dict()))

    module, x = M(), torch.randn(3, 4)
    add_tvm_dispatch(module, x)
    before = module(x)
    if change == "saved buffers":
        module.linear.register_buffer("extra", module.linear.extra, persistent=False)
    else:
        monkeypatch.setattr(Flagged, "training", False, raising=False)
        del module.flagged.training
    torch.testing.assert_close(module(x), module.forward(x))
    assert stats(module).hits == 1 and stats(module).misses and not torch.allclose(module(x), before)


REGISTERED = """
import importlib, torch
from torch import nn
KNOWN = {"none": None}
class Late(nn.Module):
    def __init__(self, refused):
        super().__init__()
        self.refused = refused
    def forward(self, x):
        if "factor" not in KNOWN:
            importlib.import_module("late_registration")
        y = x * KNOWN["factor"]
        return torch.tensor(y.detach().numpy() * 2) if self.refused else y
"""


@pytest.mark.parametrize("refused", [True, False])
def test_what_an_import_in_forward_registers_stays(refused, tmp_path, monkeypatch):
    """The module is imported once in a process: its entries must not be taken back with forward's own changes."""
    (tmp_path / "registry_of_factors.py").write_text(REGISTERED)
    (tmp_path / "late_registration.py").write_text(
        "import registry_of_factors\nregistry_of_factors.KNOWN['factor'] = 3.0"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("registry_of_factors", "late_registration"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module, x = importlib.import_module("registry_of_factors").Late(refused), torch.randn(3)
    if refused:
        with pytest.raises(UnsupportedModule):
            add_tvm_dispatch(module, x, whole=True)
    else:
        add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), x * (6 if refused else 3))
    assert refused or stats(module).hits == 1
