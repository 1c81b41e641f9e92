"""Relocatable object: the bytes of an x86-64 ELF object file → its sections, symbols and relocations."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CannotLinkError", "ElfObject", "Relocation", "Section", "Symbol", "read_object", "with_data"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")

_IDENT = b"\x7fELF\x02\x01\x01"
"""64 bits, little endian, the one version that there is."""
_RELOCATABLE, _X86_64 = 1, 62
_SYMTAB, _RELA, _NOBITS, _REL = 2, 4, 8, 9
_INITIALIZERS = (14, 15, 16)
_ALLOC, _TLS = 0x2, 0x400
_POINTER = 8
_RETURN = b"\xc3"
_LAST_INDEX = 0xFF00
_GLOBAL_OBJECT = 0x11
"""Type and binding of a symbol of data."""


class CannotLinkError(Exception):
    """An object file with something in it that this linker does not know."""


@dataclass
class Section:
    """A section that is in memory at run time; ``content`` is ``None`` for one of zeros."""

    name: str
    flags: int
    align: int
    size: int
    content: bytes | None
    relocations: list[Relocation] = field(default_factory=list)

    @property
    def is_written(self) -> bool:
        return bool(self.flags & 0x1)

    @property
    def is_code(self) -> bool:
        return bool(self.flags & 0x4)


@dataclass(frozen=True)
class Symbol:
    """``section`` is an index of :attr:`ElfObject.sections`; ``None`` where the symbol is undefined.

    Attributes:
        value: its offset in the section.
        info: type and binding, as ELF has them.
    """

    name: str
    info: int
    section: int | None
    value: int
    size: int

    @property
    def is_local(self) -> bool:
        return self.info >> 4 == 0


@dataclass(frozen=True)
class Relocation:
    """At ``offset`` of its section, the address of ``symbol`` plus ``addend``, in the form of ``kind``."""

    offset: int
    kind: int
    symbol: Symbol
    addend: int


@dataclass(frozen=True)
class ElfObject:
    """``sections`` by their index in the file: those that are in memory, without the tables for unwinding."""

    sections: dict[int, Section]
    symbols: list[Symbol]


def read_object(content: bytes) -> ElfObject:
    """Reads an object file.

    Raises:
        CannotLinkError: it is none for x86-64, or has thread-local memory, initializers or other rarities.
    """
    try:
        return _read(content)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise CannotLinkError(f"malformed: {error}") from error


def with_data(known: ElfObject, data: Mapping[str, bytes]) -> ElfObject:
    """The object with more sections that are only read, each with a global symbol of the given name."""
    sections, symbols = dict(known.sections), list(known.symbols)
    for name, content in data.items():
        index = max(sections, default=0) + 1
        sections[index] = Section(f".rodata.{name}", _ALLOC, 16, len(content), content)
        symbols.append(Symbol(name, _GLOBAL_OBJECT, index, 0, len(content)))
    return ElfObject(sections, symbols)


def _read(content: bytes) -> ElfObject:
    ident, kind, machine, _, _, _, at, _, _, _, _, size, count, names_at = _HEADER.unpack_from(content)
    if not ident.startswith(_IDENT) or (kind, machine, size) != (_RELOCATABLE, _X86_64, _SECTION.size):
        raise CannotLinkError("no object file for x86-64")
    heads = [_SECTION.unpack_from(content, at + size * index) for index in range(count)]
    names = _of(content, heads[names_at])
    sections: dict[int, Section] = {}
    initializers: list[int] = []
    for index, head in enumerate(heads):
        name, what, flags, _, _, length, _, _, align, _ = head
        text = _string(names, name)
        if not flags & _ALLOC or text == ".eh_frame":  # no exception passes through a kernel
            continue
        if flags & _TLS:
            raise CannotLinkError(f"section {text}")
        if what in _INITIALIZERS:
            initializers.append(index)
        sections[index] = Section(text, flags, max(align, 1), length, None if what == _NOBITS else _of(content, head))
    tables = [head for head in heads if head[1] == _SYMTAB]
    if len(tables) != 1:
        raise CannotLinkError(f"{len(tables)} tables of symbols")
    symbols = _symbols(content, tables[0], _of(content, heads[tables[0][6]]), sections)
    for head in heads:
        if head[1] not in (_RELA, _REL) or head[7] not in sections:
            continue
        if head[1] == _REL:
            raise CannotLinkError("relocations without addends")
        for offset, info, addend in _RELOCATION.iter_unpack(_of(content, head)):
            relocation = Relocation(offset, info & 0xFFFFFFFF, symbols[info >> 32], addend)
            sections[head[7]].relocations.append(relocation)
    for index in initializers:
        if not _does_nothing(sections[index], sections):
            raise CannotLinkError(f"section {sections[index].name}")
    kept = {index: section for index, section in sections.items() if index not in initializers}
    return ElfObject(kept, symbols)


def _does_nothing(initializers: Section, sections: Mapping[int, Section]) -> bool:
    """Whether all functions that a loader would call return at once, as what LLVM makes without optimization does."""
    found = []
    for each in initializers.relocations:
        code = sections.get(each.symbol.section)
        at = each.symbol.value + each.addend
        found.append(code is not None and code.is_code and (code.content or b"")[at : at + 1] == _RETURN)
    return len(found) == initializers.size // _POINTER and all(found)


def _of(content: bytes, head: tuple) -> bytes:
    return content[head[4] : head[4] + head[5]]


def _string(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _symbols(content: bytes, head: tuple, strings: bytes, sections: dict[int, Section]) -> list[Symbol]:
    found = []
    for name, info, _, index, value, size in _SYMBOL.iter_unpack(_of(content, head)):
        if index >= _LAST_INDEX:  # absolute values (the name of the source file), common blocks: nothing may refer to
            info, index = 0, -1
        elif index and index not in sections:  # of debugging sections
            index = -1
        found.append(Symbol(_string(strings, name), info, index if index else None, value, size))
    return found
