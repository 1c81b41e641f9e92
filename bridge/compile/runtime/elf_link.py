"""Linker: an object file that LLVM made → a shared library, as ``ld -shared`` would make it.

Machine code is kept on disk as a library, which the system's loader opens; no linker or compiler has to be installed.
What is linked is one object of position-independent code: its sections are laid out in three segments (read-only,
code, data), its own symbols are bound to itself, undefined ones go through a table that the loader fills at once.
x86-64 only; what this linker does not know it refuses, and the object's code runs from memory as without a cache.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping

from bridge.compile.runtime.elf_object import (
    CannotLinkError,
    ElfObject,
    Relocation,
    Section,
    Symbol,
    read_object,
    with_data,
)

__all__ = ["shared_library"]

_PAGE = 4096
_ABS64, _PC32, _PLT32 = 1, 2, 4
_GOT = (9, 41, 42)
"""Relocations by the offset of a symbol's place in the table of addresses, with or without leave to do without it."""
_GLOB_DAT, _RELATIVE = 6, 8
_READ, _WRITE, _EXECUTE = 4, 2, 1
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_NEEDED = b"libm.so.6"
_JUMP = b"\xff\x25"
"""``jmp *[rip + offset]``, a stub's only instruction, with two bytes of padding."""
_STUB = 8
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_HEADERS = 5


def shared_library(content: bytes, data: Mapping[str, bytes] | None = None) -> bytes:
    """A shared library that defines an object file's global symbols, and further ones for ``data``, which is only read.

    Raises:
        CannotLinkError: see :mod:`bridge.compile.runtime.elf_object`, or a relocation that is not known.
    """
    return _Link(with_data(read_object(content), data or {})).library()


class _Link:
    """One object on its way: places are file offsets, which are addresses as well."""

    def __init__(self, object_file: ElfObject):
        self.sections = object_file.sections
        self.exported = [each for each in object_file.symbols if each.section not in (None, -1) and not each.is_local]
        used = [each for section in self.sections.values() for each in section.relocations]
        self.imported = _distinct(each.symbol for each in used if each.symbol.section is None)
        self.table = _distinct([*(each.symbol for each in used if each.kind in _GOT), *self.imported])
        if any(each.symbol.section == -1 for each in used):
            raise CannotLinkError("a relocation to what is not in memory")
        if any(not symbol.name for symbol in self.imported):
            raise CannotLinkError("an undefined symbol without a name")
        self._lay_out()

    def _lay_out(self) -> None:
        """Where everything lies."""
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
    def _is_data(section: Section) -> bool:
        """Whether it is written to, if only by the loader."""
        return section.is_written or any(each.kind == _ABS64 for each in section.relocations)

    def _place(self, name: str, end: int, size: int, align: int) -> int:
        self.at[name] = _up(end, align)
        return self.at[name] + size

    def _place_sections(self, end: int, chosen: Callable[[Section], bool]) -> int:
        for index, section in self.sections.items():
            if chosen(section):
                if (section.is_written and section.is_code) or section.align > _PAGE:
                    raise CannotLinkError(f"section {section.name}")
                self.section_at[index] = _up(end, section.align)
                end = self.section_at[index] + section.size
        return end

    def library(self) -> bytes:
        """The file."""
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

    def _apply(self, made: bytearray, section: Section, at: int, each: Relocation) -> None:
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

    def _address(self, symbol: Symbol) -> int:
        """Of what is undefined, that of a stub that jumps there."""
        if symbol.section is None:
            return self.at["stubs"] + _STUB * self.imported.index(symbol)
        return self.section_at[symbol.section] + symbol.value

    def _place_in_table(self, symbol: Symbol) -> int:
        return self.at["table"] + 8 * self.table.index(symbol)

    def _relocate(self, at: int, kind: int, symbol: int, addend: int) -> None:
        self._relocations += struct.pack("<QQq", at, symbol << 32 | kind, addend)

    def _tables(self) -> dict[str, bytes]:
        symbols = bytearray(_SYMBOL.size)
        name = 1 + len(_NEEDED) + 1
        for symbol in (*self.imported, *self.exported):
            place = 0 if symbol.section is None else self._address(symbol)
            # any index but 0 says that it is defined; there is no table of sections
            symbols += _SYMBOL.pack(name, symbol.info, 0, int(symbol.section is not None), place, symbol.size)
            name += len(symbol.name.encode()) + 1
        count = 1 + len(self.imported) + len(self.exported)
        chain = [0, *range(2, count), 0][:count]  # of one bucket: all of them, one after another
        dynamic = [(1, 1), (4, self.at["hash"]), (5, self.at["strings"]), (6, self.at["symbols"])]
        dynamic += [(10, len(self.strings)), (11, _SYMBOL.size)]
        dynamic += [(7, self.at["relocations"]), (8, len(self._relocations)), (9, 24)]
        dynamic += [(24, 0), (30, 8), (0, 0)]  # all symbols are looked up when it is loaded
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

    def _ends(self, chosen: Callable[[Section], bool]) -> Iterable[int]:
        for index, section in self.sections.items():
            if chosen(section) and not self._is_data(section):
                yield self.section_at[index] + section.size


def _distinct(symbols: Iterable[Symbol]) -> list[Symbol]:
    return list(dict.fromkeys(symbols))


def _up(value: int, align: int) -> int:
    return -(-value // align) * align
