"""``python -m bridge.cache``: lists, verifies, prunes, packs and unpacks the disk cache.

    python -m bridge.cache list                    kinds, numbers, bytes; --all: each artifact
    python -m bridge.cache verify                  reads every file; --remove: removes the damaged ones
    python -m bridge.cache prune --size 500M       removes the least recently used files first
    python -m bridge.cache clear
    python -m bridge.cache pack BertForMaskedLM bert.pack
    python -m bridge.cache unpack bert.pack

A pack holds the artifacts for the lowerings of one module class: programs, kernels, measured products,
code for GPUs. Unpacking requires the same processor features and the same versions of torch, TVM and this package. Its
kernels are machine code: unpack it only from a trusted source.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bridge.artifact import (
    Artifact,
    DamagedError,
    Store,
    cache_settings,
    current_store,
    from_parts,
    key_of,
    prune,
    read_artifact,
    to_parts,
    versions,
    write_artifact,
    write_file,
)
from bridge.compile import host_features

_PACK = "pack"
_OF_ALL = ("trial", "cuda")
"""Kinds of artifacts without a lowering: packed in full, since they are small or keyed by source alone."""


def pack(name: str, path: str | os.PathLike, store: Store | None = None) -> int:
    """Writes all artifacts for the lowerings of a module class into one file; returns their number.

    Args:
        name: the class's name, with or without its Python module, as in ``"BertForMaskedLM"``.
        path: the file, which appears complete or not at all.

    Raises:
        LookupError: the cache has no lowering of that name.
        OSError: the file cannot be written.
    """
    store = current_store() if store is None else store
    found = dict(_needed(name, store))
    parts = {place: store.path(*place.split("/")).read_bytes() for place in found}
    parts |= to_parts(_made_for())
    write_file(path, write_artifact(_PACK, key_of(name), parts, name))
    return len(found)


def unpack(path: str | os.PathLike, store: Store | None = None) -> int:
    """Puts the artifacts of a pack into the cache; returns their number.

    Raises:
        ValueError: the file is no pack, is damaged, or was made for other versions or another kind of processor.
        OSError: the file cannot be read.
    """
    store = current_store() if store is None else store
    _, parts = read_artifact(Path(path).read_bytes(), _PACK)
    made_for = from_parts(parts)
    for what, here in _made_for().items():
        if made_for.get(what) != here:
            raise ValueError(f"{os.fspath(path)} was made for {what} {made_for.get(what)!r}, here it is {here!r}")
    inside = {place: content for place, content in parts.items() if "/" in place}
    for place, content in inside.items():
        kind, key = place.split("/")
        header, found = read_artifact(content, kind, key)
        store.put(kind, key, found, header["note"])
    return len(inside)


def _made_for() -> dict[str, str]:
    return {**dict(versions()), "processor features": host_features(), "platform": sys.platform}


def _needed(name: str, store: Store) -> Iterator[tuple[str, Artifact]]:
    """Yields the artifacts for the lowerings of class ``name``, each with its place ``"kind/key"``."""
    everything = {kind: dict(_all(store, kind)) for kind in ("lowering", "program", *_OF_ALL)}
    lowerings = {
        key: each for key, each in everything["lowering"].items() if name in (each.note, each.note.rpartition(".")[2])
    }
    if not lowerings:
        known = sorted({each.note for each in everything["lowering"].values()})
        raise LookupError(f"no lowering of {name!r} in {store.folder}; there are {', '.join(known) or 'none'}")
    digests: set[str] = set()
    for key, lowering in lowerings.items():
        yield f"lowering/{key}", lowering
        content = from_parts(lowering.parts)["content"]
        digests |= {key_of(content, direction) for direction in ("forward", "backward")}
    kernels: set[str] = set()
    for key, program in everything["program"].items():
        told = from_parts(program.parts)
        if told["digest"] in digests:
            yield f"program/{key}", program
            kernels |= set(told["kernels"].values())
    for key in kernels:
        for place, kernel in _one(store, "kernel", key):
            yield place, kernel
            yield from _one(store, "library", kernel.parts["library"].decode())
    for kind in _OF_ALL:
        yield from ((f"{kind}/{key}", each) for key, each in everything[kind].items())


def _one(store: Store, kind: str, key: str) -> Iterator[tuple[str, Artifact]]:
    found = store.get(kind, key)
    if found is not None:
        yield f"{kind}/{key}", found


def _all(store: Store, kind: str) -> Iterator[tuple[str, Artifact]]:
    for path in store.files():
        if path.parent.parent.name == kind and (found := store.get(kind, path.name)) is not None:
            yield path.name, found


def _list(store: Store, options: argparse.Namespace) -> int:
    kinds: dict[str, list[int]] = {}
    for path in store.files():
        kind, size = path.parent.parent.name, path.stat().st_size
        kinds.setdefault(kind, []).append(size)
        if options.all:
            header = _header(path)
            print(f"{kind:<10} {size:>10} {path.name[:12]} {header.get('note', 'damaged, or of another origin')}")
    for kind, sizes in kinds.items():
        print(f"{kind:<10} {len(sizes):>6} artifacts {sum(sizes):>12} bytes")
    total = sum(map(sum, kinds.values()))
    print(f"{store.folder}: {total} of {store.settings.most_bytes} bytes")
    return 0


def _header(path: Path) -> Mapping[str, str]:
    try:
        header, _ = read_artifact(path.read_bytes(), path.parent.parent.name, path.name)
    except (DamagedError, OSError):
        return {}
    return header


def _verify(store: Store, options: argparse.Namespace) -> int:
    count, damaged = 0, 0
    for path in store.files():
        count += 1
        if not _header(path):
            damaged += 1
            print(f"damaged, or of another origin: {path}")
            if options.remove:
                path.unlink(missing_ok=True)
    print(f"{count} files, {damaged} damaged{' and removed' if damaged and options.remove else ''}")
    return int(damaged > 0 and not options.remove)


def _prune(store: Store, options: argparse.Namespace) -> int:
    bound = {"BRIDGE_CACHE_SIZE": options.size} if options.size else {}
    removed, freed = prune(store.folder, cache_settings({**os.environ, **bound}).most_bytes)
    print(f"{removed} artifacts removed, {freed} bytes")
    return 0


def _clear(store: Store, options: argparse.Namespace) -> int:
    files = list(store.files())
    for path in (*files, *store.folder.glob("unfinished/*"), *store.folder.glob("claims/*")):
        path.unlink(missing_ok=True)
    for folder in sorted((path for path in store.folder.glob("**/") if path != store.folder), reverse=True):
        with suppress(OSError):  # the folder holds files of other origin
            folder.rmdir()
    print(f"{len(files)} artifacts removed")
    return 0


def _pack(store: Store, options: argparse.Namespace) -> int:
    print(f"{pack(options.name, options.file, store)} artifacts in {options.file}")
    return 0


def _unpack(store: Store, options: argparse.Namespace) -> int:
    print(f"{unpack(options.file, store)} artifacts from {options.file}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, or 1 with a message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m bridge.cache", description="The disk cache of compiled modules.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for run, about in (
        (_list, "what is in it"),
        (_verify, "read every file, tell what is damaged"),
        (_prune, "remove the least recently used"),
        (_clear, "remove everything"),
        (_pack, "write what a class of modules needs into a file"),
        (_unpack, "take in what is in such a file"),
    ):
        command = commands.add_parser(run.__name__[1:], help=about, description=about)
        command.set_defaults(run=run)
        if run is _list:
            command.add_argument("--all", action="store_true", help="a line for each artifact")
        if run is _verify:
            command.add_argument("--remove", action="store_true", help="remove what is damaged")
        if run is _prune:
            command.add_argument("--size", default="", help="bytes that may stay, as in 500M; default: the bound")
        if run is _pack:
            command.add_argument("name", help="class of the module, as in BertForMaskedLM")
        if run in (_pack, _unpack):
            command.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    store = current_store()
    if not store.is_usable:
        print("the cache is off, or its directory is not to be used", file=sys.stderr)
        return 1
    try:
        return options.run(store, options)
    except (LookupError, ValueError, OSError) as error:
        print(error.args[0] if isinstance(error, LookupError) else error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
