"""The linker: libraries that the system loads, with the bits of the same code run from memory; the rest is refused."""

from __future__ import annotations

import dataclasses
import platform
import struct

import pytest
import torch
from tvm.relax import op

from bridge.base.session import SESSION
from bridge.compile import Built, CompileOptions, compile_function
from bridge.compile.cpu.build import CpuLibraries
from bridge.compile.cuda import build
from bridge.compile.runtime.elf import CannotLinkError, read_object, shared_library
from tests.bridge.compile.stored_program import bits, programs
from tests.bridge.compile.test_cuda_programs import Collecting
from tests.bridge.compile_helpers import function, program

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 objects")


def object_of(made, tmp_path):
    library = CpuLibraries(made.backend.target)._unconnected(made.kernels)
    library.write_to_file(str(tmp_path / "kernels.o"), "o")
    return (tmp_path / "kernels.o").read_bytes()


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    made = program([((32, 48), "float32")], lambda emit, x: [emit(op.sin(x)), emit(x + x)])
    return object_of(made, tmp_path_factory.mktemp("object"))


def test_a_linked_library_computes_the_bits_of_the_code_in_memory():
    for made in programs().values():
        libraries = CpuLibraries(made.backend.target)
        library, content = libraries.build_bytes(made.kernels)
        assert content.startswith(b"\x7fELF")
        for each in (library, libraries.load(content)):
            code = {name: Built(lambda name=name, each=each: each[name]) for name in made.kernels}
            assert bits(dataclasses.replace(made, code=code), made) == bits(made, made)


def test_undefined_symbols_are_the_systems(content):
    names = {symbol.name for symbol in read_object(content).symbols if symbol.section is None}
    assert "sinf" in names and b"sinf\0" in shared_library(content)


@pytest.fixture(scope="module")
def launching(tmp_path_factory):
    """Host code that launches a kernel: LLVM does not optimize it, and it has an initializer, which does nothing."""
    backend = Collecting(arch="sm_90")
    doubled = function([((32, 48), "float32")], lambda emit, x: [emit(x + x)])
    compile_function(doubled, name="doubled", options=CompileOptions.current(backend))
    host, _ = build._lowered(backend.kernels, build.target_of(backend.arch))
    path = tmp_path_factory.mktemp("object") / "launch.o"
    build._host_module(host).write_to_file(str(path), "o")
    return path.read_bytes()


def test_an_initializer_that_does_nothing_is_left_out(launching):
    assert b".init_array\0" in launching
    assert not any(section.name == ".init_array" for section in read_object(launching).sections.values())
    assert b"__tvm_ffi_" in shared_library(launching)


def test_an_initializer_that_does_something_is_refused(launching):
    """It is the last of the code."""
    code = head_of(launching, b".text")
    last = code[4] + code[5] - 1
    assert launching[last] == 0xC3
    with pytest.raises(CannotLinkError, match="init_array"):
        shared_library(launching[:last] + b"\x90" + launching[last + 1 :])


def head_of(content, section):
    """The header of a section, by its name."""
    at, size, count, names = struct.unpack_from("<Q", content, 40)[0], *struct.unpack_from("<HHH", content, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", content, at + size * index) for index in range(count)]
    strings = content[heads[names][4] :]
    (found,) = [head for head in heads if strings[head[0] :].startswith(section + b"\0")]
    return found


def changed(content, section, kind):
    """The object with the first relocation of a section made another kind."""
    head = head_of(content, section)
    assert head[1] == 4
    place = head[4] + 8
    return content[:place] + struct.pack("<I", kind) + content[place + 4 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:200],
        lambda content: b"\x7fELF\x01" + content[5:],
        lambda content: content[:18] + struct.pack("<H", 183) + content[20:],  # AArch64
        lambda content: changed(content, b".rela.text", 10),  # an absolute address of 32 bits
        lambda content: changed(content, b".rela.text", 1),  # one of 64 bits, inside code
        lambda content: changed(content, b".rela.text", 19),  # thread-local memory
    ],
)
def test_what_is_not_known_is_refused(content, damage):
    with pytest.raises(CannotLinkError):
        shared_library(damage(content))


def test_what_cannot_be_linked_runs_from_memory(monkeypatch):
    def refuse(content):
        raise CannotLinkError("a relocation")

    SESSION.reset("programs")
    monkeypatch.setattr("bridge.compile.runtime.build.shared_library", refuse)
    made = program([((5, 7), "float32")], lambda emit, x: [emit(x + x)])
    library, content = CpuLibraries(made.backend.target).build_bytes(made.kernels)
    assert content is None and library.kind == "llvm"
    x = torch.randn(5, 7)
    code = {name: Built(lambda name=name: library[name]) for name in made.kernels}
    assert torch.equal(dataclasses.replace(made, code=code)([x])[0], x + x)
