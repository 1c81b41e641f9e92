"""Data flow of a code object: bytecode → its reads of state from outside, and the use of each.

An abstract interpretation: the stack and the locals hold sets of *sources* instead of values. A source says how to find
a value from outside of the function: ``("global", "cfg")``, ``("attr", source, "scale")``. An assigned local is a
source of its own, ``("var", name)``: the set of all its assigned values, whatever the order of the lines. A branch that
does not run counts as well. Both only add reads.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, reduce
from types import CodeType
from typing import Any

from bridge.guards.bytecode import (
    BUILDS,
    DEREFS,
    ENDS,
    IDLE,
    JOINS,
    JUMPS,
    NEW,
    NEW_ATTR,
    NO_PLACES,
    NOTHING,
    NULL,
    NULL_BEHIND,
    PLAIN_SOURCES,
    PUTS,
    RESULTS,
    CallSite,
    DataFlow,
    Lookups,
    computed,
    handlers,
    held_in,
    inner_stores,
    joined,
    put_by,
    result_of,
    root_of,
    text_of,
    without_locals,
)

__all__ = ["flow_of"]


@lru_cache(maxsize=4096)
def flow_of(code: CodeType) -> DataFlow:
    """The data flow of a code object."""
    return _Interpreter(code).run()


class _Interpreter(Lookups):
    def __init__(self, code: CodeType):
        super().__init__()
        self.code = code
        self.instructions = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
        self.at = {each.offset: index for index, each in enumerate(self.instructions)}
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        self.arguments = frozenset(code.co_varnames[:count])
        self.assigned = {name for each in self.instructions for name in _stored(each)} - {*code.co_freevars}
        self.states: dict[int, tuple[frozenset, ...]] = {}
        named = [(each, index) for index, each in enumerate(self.instructions) if each.opname == "KW_NAMES"]
        self.keywords = {self._call_behind(index): code.co_consts[each.arg] for each, index in named}
        self.assigned |= {name for each in self.instructions if (name := put_by(each))}
        for name in self.assigned:
            self.flow.variables[name] = {("arg", name): None} if name in self.arguments else {}
        for name in inner_stores(code) & self.assigned if code.co_cellvars else ():
            self.flow.variables[name]["made",] = None
        self.rules: dict[str, Callable[..., bool]] = {}

    def _call_behind(self, index: int) -> int:
        """The offset of the call that a ``KW_NAMES`` instruction belongs to."""
        return next(each.offset for each in self.instructions[index:] if each.opname == "CALL")

    def run(self) -> DataFlow:
        waiting = [0]
        self.states[0] = ()
        for target, depth in handlers(self.code):
            if target in self.at:
                self.states[self.at[target]] = (NOTHING,) * depth
                waiting.append(self.at[target])
        while waiting:
            index = waiting.pop()
            for follower, stack in self._step(index, list(self.states[index])):
                if follower < len(self.instructions) and self._merge(follower, stack):
                    waiting.append(follower)
        self.flow.offsets = [each.offset for each in self.instructions]
        keys = [source[2] for source in self.flow.reads if source[0] in ("item", "member")]
        self.flow.by_results = bool(self.flow.relations) or any(
            key[0] in ("result", "var") and self.flow.places(key) for key in keys
        )
        return self.flow

    def _merge(self, index: int, stack: list[frozenset]) -> bool:
        known = self.states.get(index)
        if known is None:
            self.states[index] = tuple(stack)
            return True
        height = min(len(known), len(stack))
        pairs = zip(known[len(known) - height :], stack[len(stack) - height :], strict=True)
        made = tuple(a if a == b else joined(self._marked(a), self._marked(b)) for a, b in pairs)
        if made == known:
            return False
        self.states[index] = made
        return True

    def _marked(self, value: frozenset) -> frozenset:
        """A value's sources, with a mark where they may not give its plain value: in place of another it counts too."""
        roots = {source: root_of(source) for source in value}
        if any(source[0] in PLAIN_SOURCES and root[0] not in RESULTS for source, root in roots.items()):
            return value
        calls = {root[1] for root in roots.values() if root[0] == "result" and root[1] in self.flow.calls}
        others = not calls or any(root[0] in ("each", "held") for root in roots.values())
        return value | {("computed", place) for place in calls} | ({("made",)} if others else NOTHING)

    def _store(self, name: str, value: frozenset) -> None:
        self.flow.variables[name].update(dict.fromkeys(self._marked(value)))

    def _held(self, name: str) -> frozenset:
        """The sources of values that this function puts into containers, or sets as an attribute."""
        return frozenset((("var", name),)) if name in self.assigned else NOTHING

    def _local(self, name: str) -> frozenset:
        if name in self.assigned:
            return frozenset((("var", name),))
        return frozenset((("arg", name),)) if name in self.arguments else NOTHING

    def _step(self, index: int, stack: list[frozenset]) -> Iterator[tuple[int, list[frozenset]]]:
        each = self.instructions[index]
        name, argument = each.opname, each.argval
        jump = each.argval if each.opcode in JUMPS else None
        target = None if jump is None else self.at.get(jump)
        height = len(stack)

        def pop(raw: bool = False) -> frozenset:
            found = stack.pop() if stack else NOTHING
            return found if raw else without_locals(found)

        before = list(stack)
        self._do(each, name, argument, stack, pop)
        if target is not None:
            other = stack
            if name == "FOR_ITER":
                other = before[:-1] if sys.version_info < (3, 12) else [*before, NOTHING]
            elif name in ("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP"):
                other = before
            elif name == "SEND" and sys.version_info < (3, 12):  # exhausted
                other = [*before[:-2], result_of(each)]
            elif name in ("SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH"):
                other = [*before[: height - (name != "SETUP_FINALLY")], *[NOTHING] * 6]
            yield target, list(other)
        if name not in ENDS:
            yield index + 1, stack

    def _do(self, each: Any, name: str, argument: Any, stack: list[frozenset], pop: Any) -> None:
        """Applies an instruction by the first rule that accepts it; remembers the rule."""
        known = self.rules.get(name)
        if known is not None:
            known(each, name, argument, stack, pop)
            return
        rules = self._constant, self._variable, self._place, self._operation, self._match, self._container
        for rule in (*rules, self._called, self._other):
            if rule(each, name, argument, stack, pop):
                self.rules[name] = rule
                return

    def _constant(self, each: Any, name: str, argument: Any, stack: list[frozenset], pop: Any) -> bool:
        """Constants, and instructions that only pop the stack."""
        if name in IDLE:
            pass
        elif name in ("POP_TOP", "POP_EXCEPT", "POP_ITER", "END_FOR") and (name != "POP_EXCEPT" or NEW):
            pop()
            if name == "END_FOR" and sys.version_info < (3, 13):  # pops the iterator as well
                pop()
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT"):
            plain = isinstance(argument, str | int | float | bytes | bool | type(None))
            constants = isinstance(argument, tuple) and all(
                isinstance(n, str | int | float | None.__class__) for n in argument
            )
            stack.append(frozenset((("const", argument),)) if plain or constants else NOTHING)
        else:
            return False
        return True

    def _variable(self, each: Any, name: str, argument: Any, stack: list[frozenset], pop: Any) -> bool:
        """Locals, cells and globals."""
        raw = each.arg or 0
        if name.startswith(("LOAD_FAST", "STORE_FAST")):
            names = argument if isinstance(argument, tuple) else (argument,)
            if name == "LOAD_FAST_AND_CLEAR":  # restored after a comprehension: the variable's own value
                stack.append(NOTHING)
            elif name == "STORE_FAST_LOAD_FAST":
                self._store(names[0], pop())
                stack.append(self._local(names[1]))
            elif name == "STORE_FAST_STORE_FAST":
                self._store(names[0], pop())
                self._store(names[1], pop())
            elif name.startswith("STORE"):
                self._store(names[0], pop())
            else:
                stack.extend(self._local(each) | {("local", each)} for each in names)
        elif name in DEREFS or name == "LOAD_FROM_DICT_OR_DEREF":
            if name == "LOAD_FROM_DICT_OR_DEREF":
                pop()
            free = argument in self.code.co_freevars
            stack.append(self._read("cell", argument) if free else self._local(argument))
        elif name == "STORE_DEREF":
            if argument in self.code.co_freevars:
                self.flow.writes["cell", argument] = None
                pop()
            else:
                self._store(argument, pop())
        elif name in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
            if name == "LOAD_FROM_DICT_OR_GLOBALS":
                pop()
            null = name == "LOAD_GLOBAL" and NEW and raw & 1
            if null and not NULL_BEHIND:
                stack.append(NULL)
            stack.append(
                joined(self._read("global", argument), self._local(argument) if name == "LOAD_NAME" else NOTHING)
            )
            if null and NULL_BEHIND:
                stack.append(NULL)
        elif name == "STORE_NAME":
            self._store(argument, pop())
            self.flow.writes["global", argument] = None
        elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            self.flow.writes["global", argument] = None
            if name == "STORE_GLOBAL":
                pop()
        else:
            return False
        return True

    def _place(self, each: Any, name: str, argument: Any, stack: list[frozenset], pop: Any) -> bool:
        """Attributes, items and slices: looked up, and written."""
        raw = each.arg or 0
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            owner = pop()
            found = joined(self._of("attr", owner, argument), result_of(each), self._held(f".{argument}"))
            if argument == "__self__":  # a bound method's owner
                found = joined(found, frozenset(("receiver", source) for source in owner))
            if name == "LOAD_METHOD" or (NEW_ATTR and raw & 1):
                stack += [NULL, found] if not NULL_BEHIND else [found, NULL]
            else:
                stack.append(found)
        elif name in ("LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD", "LOAD_ZERO_SUPER_ATTR", "LOAD_ZERO_SUPER_METHOD"):
            pop(), pop(), pop()
            found = joined(self._read("super", argument), result_of(each))
            if name == "LOAD_SUPER_ATTR" and not raw & 1:
                stack.append(found)
            else:
                stack += [NULL, found] if not NULL_BEHIND else [found, NULL]
        elif name in ("STORE_ATTR", "DELETE_ATTR"):
            owner = pop()
            if name == "STORE_ATTR":
                self._store(f".{argument}", pop())
            for source in owner:
                self.flow.writes["attr", source, argument] = None
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            key, owner = pop(), pop()
            if name == "STORE_SUBSCR":
                self._store("[]", pop())
            for source in owner:
                self.flow.writes["item", source, key] = None
        elif name == "BINARY_SLICE":
            pop(), pop()
            owner = pop()
            self._whole(owner)
            stack.append(joined(self._each(owner), result_of(each)))
        elif name == "STORE_SLICE":
            pop(), pop()
            for source in pop():
                self.flow.writes["item", source, NOTHING] = None
            pop()
        else:
            return False
        return True

    def _operation(self, each: Any, name: str, argument: Any, stack: list[frozenset], pop: Any) -> bool:
        """Operators, comparisons and truth."""
        if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and str(each.argrepr) == "[]"):  # from 3.14 on
            key, owner = pop(), pop()
            stack.append(joined(self._item(owner, key, each.offset), self._held("[]")))
        elif name == "BINARY_OP" or name.startswith(("BINARY_", "INPLACE_")):
            right, left = pop(raw=True), pop(raw=True)
            made = computed(str(each.argrepr).rstrip("="), left, right)
            right, left = without_locals(right), without_locals(left)
            self._whole(joined(left, right), compared=str(each.argrepr).startswith("%"))
            parts = [self._parts(value) for value in (left, right) if str(each.argrepr).startswith(("+", "|"))]
            self.derived[each.offset] = left | right
            stack.append(joined(*parts, made, result_of(each)))
        elif name == "COMPARE_OP":
            right, left = pop(), pop()
            self._whole(joined(left, right), compared=True)
            self._compared(left | right)
            stack.append(NOTHING)
        elif name == "IS_OP":
            right, left = pop(), pop()
            if not any(source[0] == "const" for source in (*left, *right)):  # ``is None`` asks for no identity
                self.flow.identities.update((source, None) for source in (*left, *right))
            stack.append(NOTHING)
        elif name == "CONTAINS_OP":
            container, key = pop(), pop()
            self.flow.iterated.update((source, None) for source in container if source[0] not in NO_PLACES)
            for source in container:
                for which in without_locals(key) or key:
                    if source[0] != "null":
                        self.flow.reads["item" if which[0] == "const" else "member", source, which] = None
            self._whole(key, compared=True)
            stack.append(NOTHING)
        elif name.startswith("UNARY_") or name in ("TO_BOOL", "GET_LEN"):
            value = stack[-1] if name == "GET_LEN" and stack else pop()
            self._whole(value)
            stack.append(value if name == "TO_BOOL" else NOTHING)
        else:
            return False
        return True

    def _match(self, each: Any, name: str, argument: Any, stack: list[frozenset], pop: Any) -> bool:
        """Exceptions, patterns, iteration and unpacking."""
        raw = each.arg or 0
        if name == "RAISE_VARARGS":
            raised = [pop() for _ in range(raw)]
            self.flow.relations[each.offset] = NOTHING, joined(*raised)
        elif name in ("CHECK_EXC_MATCH", "MATCH_CLASS"):
            names = pop() if name == "MATCH_CLASS" else NOTHING
            kinds = pop()
            value = pop() if name == "MATCH_CLASS" else stack[-1] if stack else NOTHING
            self.flow.relations[each.offset] = value, kinds
            if name == "CHECK_EXC_MATCH" and stack:
                stack[-1] |= {("caught", source) for source in kinds}
            parts = [part for source in names if source[0] == "const" for part in source[1] or ()]
            found = [self._of("attr", value, part) for part in parts]
            found += [self._each(value), self._of("matched", value, raw)] if raw and name == "MATCH_CLASS" else []
            stack.append(frozenset(("held", part) for one in found for part in one) | NOTHING)
        elif name == "MATCH_KEYS" and len(stack) > 1:
            keys = [key for source in stack[-1] if source[0] == "const" for key in source[1]]
            found = [self._item(stack[-2], frozenset((("const", key),)), None) for key in keys]
            stack.append(frozenset(("held", part) for one in found for part in one))
            if not NEW:
                stack.append(NOTHING)
        elif name in ("GET_ITER", "GET_YIELD_FROM_ITER"):
            value = pop()
            self._iterated(value)
            stack.append(joined(value, result_of(each)))
        elif name == "FOR_ITER":
            owner = stack[-1] if stack else NOTHING
            stack.append(joined(self._each(owner), result_of(each), self._held("[]")))
        elif name in ("UNPACK_SEQUENCE", "UNPACK_EX"):
            value = pop()
            self._iterated(value)
            parts = raw if name == "UNPACK_SEQUENCE" else (raw & 255) + (raw >> 8) + 1
            known = [self._item(value, frozenset((("const", place),)), None) for place in range(parts)]
            several = name == "UNPACK_EX"
            given = result_of(each)
            stack += [joined(self._each(value) if several else part, given) for part in reversed(known)]
        else:
            return False
        return True

    def _container(self, each: Any, name: str, argument: Any, stack: list[frozenset], pop: Any) -> bool:
        """Containers: built, joined and appended to."""
        raw = each.arg or 0
        if name in BUILDS:
            parts = [pop() for _ in range(raw)]
            stack.append(joined(frozenset((("made",),)), *map(held_in, parts)) if parts else NOTHING)
        elif name in ("BUILD_MAP", "BUILD_CONST_KEY_MAP"):
            parts = [pop() for _ in range(2 * raw if name == "BUILD_MAP" else raw + 1)]
            stack.append(joined(*map(held_in, parts)) if parts else NOTHING)
        elif name in JOINS:
            value = pop()
            extends = name not in ("LIST_APPEND", "SET_ADD")
            if extends:
                self._iterated(value)
                value = joined(value, result_of(each))  # a generator's result
            held = value if extends else held_in(value)
            if len(stack) >= raw > 0:
                stack[-raw] = joined(stack[-raw], held)
        elif name == "MAP_ADD":
            value, _ = pop(), pop()
            if len(stack) >= raw > 0:
                stack[-raw] = joined(stack[-raw], held_in(value))
        elif name == "LIST_TO_TUPLE":
            pass
        else:
            return False
        return True

    def _called(self, each: Any, name: str, argument: Any, stack: list[frozenset], pop: Any) -> bool:
        """The stack's order, calls, contexts, imports, formatting and conditional jumps."""
        raw = each.arg or 0
        if name == "COPY":
            stack.append(stack[-raw] if len(stack) >= raw else NOTHING)
        elif name == "SWAP":
            if len(stack) >= raw:
                stack[-1], stack[-raw] = stack[-raw], stack[-1]
        elif name == "PUSH_NULL":
            stack.append(NULL)
        elif name in ("CALL", "CALL_KW", "CALL_FUNCTION", "CALL_METHOD", "CALL_FUNCTION_KW"):
            self._call(each, name, raw, stack, pop)
        elif name == "CALL_FUNCTION_EX":
            keywords = pop() if raw & 1 or NULL_BEHIND else NOTHING
            args, function = pop(), pop()
            if NULL_BEHIND and function == NULL:
                function = pop()
            elif sys.version_info >= (3, 11):
                pop()
            self._whole(joined(args, keywords))
            spread = joined(self._each(args), self._each(keywords))
            self.flow.calls[each.offset] = CallSite(function, None, (), spread)
            for source in spread:
                self.flow.wholes.setdefault(("passed", source, each.offset), False)
            stack.append(result_of(each))
        elif name in ("BEFORE_WITH", "SETUP_WITH", "BEFORE_ASYNC_WITH"):
            manager = pop()
            self._whole(manager)  # a lock, before it is acquired
            self._of("attr", manager, "__enter__")
            self._of("attr", manager, "__exit__")
            stack += [NOTHING, joined(result_of(each), manager)]
        elif name == "IMPORT_NAME":
            names, level = pop(), pop()
            levels = [source[1] for source in level if source[0] == "const"]
            stack.append(self._read("import", argument, levels[0] if levels else 0, ("const", None) not in names))
        elif name == "IMPORT_FROM":
            found = self._of("attr", stack[-1] if stack else NOTHING, argument)
            stack.append(joined(found, result_of(each)))
        elif name in ("BUILD_STRING", "BUILD_SLICE"):
            parts = [pop(raw=True) for _ in range(raw)][::-1]
            self._whole(without_locals(joined(*parts)))
            stack.append(reduce(partial(computed, "+"), parts) if name == "BUILD_STRING" else NOTHING)
        elif name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "CONVERT_VALUE", "FORMAT_WITH_SPEC"):
            if (name == "FORMAT_VALUE" and raw & 4) or name == "FORMAT_WITH_SPEC":
                pop()
            value = pop(raw=True)
            self._whole(without_locals(value), compared=True)
            stack.append(text_of(value) if name == "FORMAT_SIMPLE" or (name, raw) == ("FORMAT_VALUE", 0) else NOTHING)
        elif name == "POP_JUMP_IF_NONE" or name == "POP_JUMP_IF_NOT_NONE" or name.endswith("_IF_NONE"):
            pop()
        elif name.startswith(("POP_JUMP", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")):
            self._whole(pop())
        else:
            return False
        return True

    def _call(self, each: Any, name: str, count: int, stack: list[frozenset], pop: Any) -> None:
        keywords: tuple[str, ...] = ()
        if name in ("CALL_KW", "CALL_FUNCTION_KW"):
            names = pop()
            keywords = next((source[1] for source in names if source[0] == "const"), ())
        elif name == "CALL":
            keywords = self.keywords.get(each.offset, ())
        args = [pop(raw=True) for _ in range(count)][::-1]
        one = pop()
        other = NULL if name in ("CALL_FUNCTION", "CALL_FUNCTION_KW") else pop()
        # either NULL and a function, or a method and its object; both orders occur
        function = joined(one, other) - NULL
        positional = args[: len(args) - len(keywords)]
        made = CallSite(function, tuple(positional), tuple(zip(keywords, args[len(positional) :], strict=True)))
        self.flow.calls[each.offset] = made
        puts = any(source[0] == "attr" and source[2] in PUTS for source in function)
        for value in args:
            if puts:
                self._store("[]", without_locals(value))
            for source in value:
                if source[0] not in (*NO_PLACES, "made"):
                    self.flow.wholes.setdefault(("passed", source, each.offset), False)
        text = text_of(args[0], *function) if function == {("global", "str")} and len(args) == 1 else NOTHING
        stack.append(text | result_of(each))

    def _other(self, each: Any, name: str, argument: Any, stack: list[frozenset], pop: Any) -> bool:
        """An instruction without a rule: notes all its operands as looked at; its results have no known source."""
        try:
            effect = dis.stack_effect(each.opcode, each.arg, jump=False)
        except ValueError:
            effect = 0
        for _ in range(max(0, -effect)):
            self._whole(pop())
        if effect == 0 and stack and each.opname.startswith(("ROT_", "MATCH_", "SET_FUNCTION_ATTRIBUTE")):
            return True
        stack.extend([NOTHING] * max(0, effect))
        return True


def _stored(each: Any) -> tuple[str, ...]:
    """The variables that an instruction assigns."""
    if not each.opname.startswith("STORE_FAST") and each.opname not in ("STORE_NAME", "STORE_DEREF"):
        return ()
    names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
    return names[:1] if each.opname == "STORE_FAST_LOAD_FAST" else names
