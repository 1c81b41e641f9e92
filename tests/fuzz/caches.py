"""Source of typical caches that a forward fills, for random modules to read."""

from __future__ import annotations

CACHES = '''\
TABLES, LOCAL, CONTEXT, OF_MODULES = {}, threading.local(), contextvars.ContextVar("table"), weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=8)
def ramp(count, dtype):
    """A table under ``lru_cache``."""
    return torch.arange(count, dtype=dtype) / (count + 1)


def from_dict(count, dtype):
    """A table of a dictionary that forward fills, as of positions."""
    if (count, dtype) not in TABLES:
        TABLES[count, dtype] = torch.ones(count, dtype=dtype).cumsum(0) * 0.3
    return TABLES[count, dtype]


def from_thread(count, dtype):
    """The last table of this thread, made anew for another size."""
    made = getattr(LOCAL, "made", None)
    if made is None or made.shape != (count,) or made.dtype != dtype:
        LOCAL.made = made = torch.linspace(-1, 1, count, dtype=dtype)
    return made


def from_context(count, dtype):
    """The table of a context variable."""
    made = CONTEXT.get(None)
    if made is None or len(made) < count or made.dtype != dtype:
        CONTEXT.set(made := torch.arange(2 * count, dtype=dtype).sin())
    return made[:count]


def from_function(count, dtype):
    """A table in attributes of the function."""
    if getattr(from_function, "key", None) != (count, dtype):
        from_function.key, from_function.made = (count, dtype), torch.full((count,), 0.7, dtype=dtype)
    return from_function.made


def of_module(module, count, dtype):
    """The tables of a module, in a dictionary of weak keys."""
    tables = OF_MODULES.setdefault(module, {})
    return tables.setdefault((count, dtype), torch.arange(count, dtype=dtype).cos())


class Rotary(nn.Module):
    """Cosines in attributes, made anew for a longer sequence."""

    def __init__(self):
        super().__init__()
        self.length, self.cosines = 0, None

    def forward(self, x):
        if x.shape[-1] > self.length:
            self.length = x.shape[-1]
            self.cosines = (torch.arange(self.length) * 0.3).cos()
        return x * self.cosines[: x.shape[-1]].to(x.dtype)


class Box:
    """An object with a tensor and a list of tensors."""

    def __init__(self, *tensors):
        self.first, self.all = tensors[0], list(tensors)
'''
