"""ELF linker: a relocatable object file of LLVM → a shared library, as ``ld -shared`` makes it, in this process.

Machine code is kept on disk as a library, which the system's loader opens; no linker or compiler need be installed. The
input is one object of position-independent code: its sections are laid out in three segments (read-only, code, data),
its own symbols are bound to itself, undefined symbols go through a table that the loader fills at once. x86-64 only;
the linker refuses any unknown feature, and the object's code then runs from memory without the disk cache.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["CannotLinkError", "ElfObject", "ElfSection", "ElfSymbol", "Relocation", "read_object", "shared_library"]
__all__ += ["with_data"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")

_IDENT = b"\x7fELF\x02\x01\x01"
"""64 bits, little endian, ELF version 1."""
_RELOCATABLE, _X86_64 = 1, 62
_SYMTAB, _RELA, _NOBITS, _REL = 2, 4, 8, 9
_INITIALIZERS = (14, 15, 16)
_ALLOC, _TLS = 0x2, 0x400
_POINTER = 8
_RETURN = b"\xc3"
_LAST_INDEX = 0xFF00
_GLOBAL_OBJECT = 0x11
"""Type and binding of a data symbol."""


class CannotLinkError(Exception):
    """An object file with a feature that this linker does not support."""


@dataclass
class ElfSection:
    """A section that is in memory at run time; ``content`` is ``None`` for zeros."""

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
class ElfSymbol:
    """``section``: an index of :attr:`ElfObject.sections`; ``None`` for an undefined symbol.

    Attributes:
        value: its offset in the section.
        info: type and binding, as in ELF.
    """

    name: str
    info: int
    section: int | None
    value: int
    size: int


@dataclass(frozen=True)
class Relocation:
    """Writes the address of ``symbol`` plus ``addend`` at ``offset`` of its section, in the format of ``kind``."""

    offset: int
    kind: int
    symbol: ElfSymbol
    addend: int


@dataclass(frozen=True)
class ElfObject:
    """``sections``: index in the file → section that is in memory, without unwinding tables."""

    sections: dict[int, ElfSection]
    symbols: list[ElfSymbol]


def read_object(content: bytes) -> ElfObject:
    """Reads an object file.

    Raises:
        CannotLinkError: not x86-64, or it has thread-local memory, initializers or other unsupported features.
    """
    try:
        return _read(content)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise CannotLinkError(f"malformed: {error}") from error


def with_data(known: ElfObject, data: Mapping[str, bytes]) -> ElfObject:
    """Adds a read-only section for each of ``data``, with a global symbol of its name."""
    sections, symbols = dict(known.sections), list(known.symbols)
    for name, content in data.items():
        index = max(sections, default=0) + 1
        sections[index] = ElfSection(f".rodata.{name}", _ALLOC, 16, len(content), content)
        symbols.append(ElfSymbol(name, _GLOBAL_OBJECT, index, 0, len(content)))
    return ElfObject(sections, symbols)


def _read(content: bytes) -> ElfObject:
    ident, kind, machine, _, _, _, at, _, _, _, _, size, count, names_at = _HEADER.unpack_from(content)
    if not ident.startswith(_IDENT) or (kind, machine, size) != (_RELOCATABLE, _X86_64, _SECTION.size):
        raise CannotLinkError("no object file for x86-64")
    heads = [_SECTION.unpack_from(content, at + size * index) for index in range(count)]
    names = _of(content, heads[names_at])
    sections: dict[int, ElfSection] = {}
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
        sections[index] = ElfSection(
            text, flags, max(align, 1), length, None if what == _NOBITS else _of(content, head)
        )
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


def _does_nothing(initializers: ElfSection, sections: Mapping[int, ElfSection]) -> bool:
    """Whether all initializers return at once, as LLVM generates them without optimization."""
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


def _symbols(content: bytes, head: tuple, strings: bytes, sections: dict[int, ElfSection]) -> list[ElfSymbol]:
    found = []
    for name, info, _, index, value, size in _SYMBOL.iter_unpack(_of(content, head)):
        if index >= _LAST_INDEX:  # absolute values (the source file's name), common blocks: no reference allowed
            info, index = 0, -1
        elif index and index not in sections:  # debugging sections
            index = -1
        found.append(ElfSymbol(_string(strings, name), info, index if index else None, value, size))
    return found


_PAGE = 4096
_ABS64, _PC32, _PLT32 = 1, 2, 4
_GOT = (9, 41, 42)
"""Relocations by the offset of a symbol's entry in the address table; some allow to bypass the table."""
_GLOB_DAT, _RELATIVE = 6, 8
_READ, _WRITE, _EXECUTE = 4, 2, 1
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_NEEDED = b"libm.so.6"
_JUMP = b"\xff\x25"
"""``jmp *[rip + offset]``, a stub's only instruction, with two bytes of padding."""
_STUB = 8

_PROGRAM = struct.Struct("<IIQQQQQQ")

_HEADERS = 5


def shared_library(content: bytes, data: Mapping[str, bytes] | None = None) -> bytes:
    """A shared library that defines an object file's global symbols, and a read-only symbol for each of ``data``.

    Raises:
        CannotLinkError: see :func:`read_object`, or an unknown relocation.
    """
    return _Link(with_data(read_object(content), data or {})).library()


class _Link:
    """Links one object; places are file offsets, which are addresses as well."""

    def __init__(self, object_file: ElfObject):
        self.sections = object_file.sections
        self.exported = [
            each for each in object_file.symbols if each.section not in (None, -1) and each.info >> 4
        ]  # not local
        used = [each for section in self.sections.values() for each in section.relocations]
        self.imported = _distinct(each.symbol for each in used if each.symbol.section is None)
        self.table = _distinct([*(each.symbol for each in used if each.kind in _GOT), *self.imported])
        if any(each.symbol.section == -1 for each in used):
            raise CannotLinkError("a relocation to what is not in memory")
        if any(not symbol.name for symbol in self.imported):
            raise CannotLinkError("an undefined symbol without a name")
        self._lay_out()

    def _lay_out(self) -> None:
        """Assigns a place to every part of the file."""
        symbols = [*self.imported, *self.exported]
        self.strings = b"\0" + b"\0".join([_NEEDED, *(symbol.name.encode() for symbol in symbols)]) + b"\0"
        absolute = sum(each.kind == _ABS64 for section in self.sections.values() for each in section.relocations)
        self.at: dict[str, int] = {}
        self.section_at: dict[int, int] = {}
        end = _HEADER.size + _HEADERS * _PROGRAM.size
        for name, size in (
            ("symbols", _SYMBOL.size * (1 + len(symbols))),
            ("hash", 4 * (2 + 1 + 1 + len(symbols))),
            ("strings", len(self.strings)),
            ("relocations", 24 * (len(self.table) + absolute)),
        ):
            end = self._place(name, end, size, 8)
        end = self._place_sections(end, lambda section: not self._is_data(section) and not section.is_code)
        self.code = end = _up(end, _PAGE)
        end = self._place_sections(end, lambda section: section.is_code)
        end = self._place("stubs", end, _STUB * len(self.imported), 16)
        self.data = end = _up(end, _PAGE)
        end = self._place("dynamic", end, 16 * 12, 16)
        end = self._place("table", end, 8 * len(self.table), 16)
        end = self._place_sections(end, lambda section: self._is_data(section) and section.content is not None)
        self.file_end = end
        self.end = self._place_sections(end, lambda section: self._is_data(section) and section.content is None)

    @staticmethod
    def _is_data(section: ElfSection) -> bool:
        """Whether a section is written to, if only by the loader."""
        return section.is_written or any(each.kind == _ABS64 for each in section.relocations)

    def _place(self, name: str, end: int, size: int, align: int) -> int:
        self.at[name] = _up(end, align)
        return self.at[name] + size

    def _place_sections(self, end: int, chosen: Callable[[ElfSection], bool]) -> int:
        for index, section in self.sections.items():
            if chosen(section):
                if (section.is_written and section.is_code) or section.align > _PAGE:
                    raise CannotLinkError(f"section {section.name}")
                self.section_at[index] = _up(end, section.align)
                end = self.section_at[index] + section.size
        return end

    def library(self) -> bytes:
        """The bytes of the shared library."""
        made = bytearray(self.file_end)
        self._relocations = bytearray()
        for index, section in self.sections.items():
            if section.content is not None:
                made[self.section_at[index] : self.section_at[index] + section.size] = section.content
        for index, section in self.sections.items():
            for each in section.relocations:
                self._apply(made, section, self.section_at[index] + each.offset, each)
        for number, symbol in enumerate(self.imported):
            at = self.at["stubs"] + _STUB * number
            made[at : at + 6] = _JUMP + (self._place_in_table(symbol) - (at + 6)).to_bytes(4, "little", signed=True)
        for symbol in self.table:
            if symbol.section is None:
                self._relocate(self._place_in_table(symbol), _GLOB_DAT, 1 + self.imported.index(symbol), 0)
            else:
                self._relocate(self._place_in_table(symbol), _RELATIVE, 0, self._address(symbol))
        for name, part in self._tables().items():
            made[self.at[name] : self.at[name] + len(part)] = part
        made[: _HEADER.size + _HEADERS * _PROGRAM.size] = self._headers()
        return bytes(made)

    def _apply(self, made: bytearray, section: ElfSection, at: int, each: Relocation) -> None:
        symbol = each.symbol
        if each.kind == _ABS64 and not section.is_code:
            if symbol.section is None:
                raise CannotLinkError(f"the address of {symbol.name} in data")
            self._relocate(at, _RELATIVE, 0, self._address(symbol) + each.addend)
            return
        if each.kind in _GOT:
            goal = self._place_in_table(symbol)
        elif each.kind in (_PC32, _PLT32):
            goal = self._address(symbol)
        else:
            raise CannotLinkError(f"relocation {each.kind} in {section.name}")
        made[at : at + 4] = (goal + each.addend - at).to_bytes(4, "little", signed=True)

    def _address(self, symbol: ElfSymbol) -> int:
        """The symbol's address; for an undefined symbol, that of a stub that jumps to it."""
        if symbol.section is None:
            return self.at["stubs"] + _STUB * self.imported.index(symbol)
        return self.section_at[symbol.section] + symbol.value

    def _place_in_table(self, symbol: ElfSymbol) -> int:
        return self.at["table"] + 8 * self.table.index(symbol)

    def _relocate(self, at: int, kind: int, symbol: int, addend: int) -> None:
        self._relocations += struct.pack("<QQq", at, symbol << 32 | kind, addend)

    def _tables(self) -> dict[str, bytes]:
        symbols = bytearray(_SYMBOL.size)
        name = 1 + len(_NEEDED) + 1
        for symbol in (*self.imported, *self.exported):
            place = 0 if symbol.section is None else self._address(symbol)
            # any index but 0 marks it as defined; there is no table of sections
            symbols += _SYMBOL.pack(name, symbol.info, 0, int(symbol.section is not None), place, symbol.size)
            name += len(symbol.name.encode()) + 1
        count = 1 + len(self.imported) + len(self.exported)
        chain = [0, *range(2, count), 0][:count]  # one bucket with all symbols
        dynamic = [(1, 1), (4, self.at["hash"]), (5, self.at["strings"]), (6, self.at["symbols"])]
        dynamic += [(10, len(self.strings)), (11, _SYMBOL.size)]
        dynamic += [(7, self.at["relocations"]), (8, len(self._relocations)), (9, 24)]
        dynamic += [(24, 0), (30, 8), (0, 0)]  # resolves all symbols at load time
        return {
            "symbols": bytes(symbols),
            "hash": struct.pack(f"<{3 + count}I", 1, count, int(count > 1), *chain),
            "strings": self.strings,
            "relocations": bytes(self._relocations),
            "dynamic": b"".join(struct.pack("<QQ", *entry) for entry in dynamic),
        }

    def _headers(self) -> bytes:
        ident = b"\x7fELF\x02\x01\x01" + bytes(9)
        head = _HEADER.pack(ident, 3, 62, 1, 0, _HEADER.size, 0, 0, _HEADER.size, _PROGRAM.size, _HEADERS, 0, 0, 0)
        only_read = max(
            [self.at["relocations"] + len(self._relocations), *self._ends(lambda section: not section.is_code)]
        )
        code_end = self.at["stubs"] + _STUB * len(self.imported)
        dynamic = self.at["dynamic"]
        segments = (
            (_LOAD, _READ, 0, only_read, only_read, _PAGE),
            (_LOAD, _READ | _EXECUTE, self.code, code_end - self.code, code_end - self.code, _PAGE),
            (_LOAD, _READ | _WRITE, self.data, self.file_end - self.data, self.end - self.data, _PAGE),
            (_DYNAMIC, _READ | _WRITE, dynamic, 16 * 12, 16 * 12, 8),
            (_STACK, _READ | _WRITE, 0, 0, 0, 16),
        )
        return head + b"".join(
            _PROGRAM.pack(kind, flags, at, at, at, in_file, in_memory, align)
            for kind, flags, at, in_file, in_memory, align in segments
        )

    def _ends(self, chosen: Callable[[ElfSection], bool]) -> Iterable[int]:
        for index, section in self.sections.items():
            if chosen(section) and not self._is_data(section):
                yield self.section_at[index] + section.size


def _distinct(symbols: Iterable[ElfSymbol]) -> list[ElfSymbol]:
    return list(dict.fromkeys(symbols))


def _up(value: int, align: int) -> int:
    return -(-value // align) * align
