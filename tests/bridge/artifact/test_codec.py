"""The codec: values come back equal and of their type; values without a form and foreign bytes are refused by name."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, make_dataclass

import pytest
import torch

from autodiff.extents import Extent, ExtentScope
from bridge.artifact import (
    DamagedError,
    NoFormError,
    from_parts,
    from_text,
    key_of,
    read_artifact,
    read_safetensors,
    to_parts,
    to_text,
    write_artifact,
    write_file,
    write_safetensors,
    written,
)
from bridge.compile.schedule.products import LayoutClass
from bridge.library import TensorAt

VALUES = [
    None,
    True,
    -(2**70),
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    "",
    '"is"\n\u20ac',
    (),
    (1, (2.0, "x"), None),
    [],
    [(1,), [2]],
    {},
    {"a": (1, [2]), "b": {}},
    {"is": "list"},
    {1: "x", (2,): None},
    frozenset([1, 2.5]),  # in the order of no hash of text, which differs from worker to worker
    complex(-0.0, math.inf),
    torch.bfloat16,
    torch.strided,
    torch.channels_last,
    torch.device("cpu"),
    torch.device("cuda", 1),
    TensorAt(3),
    (LayoutClass("row", lasting=True), {"at": TensorAt(0)}),
]


def same(one, other):
    assert type(one) is type(other) and one == other
    if type(one) is float:
        assert struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, tuple | list):
        for mine, its in zip(one, other, strict=True):
            same(mine, its)
    if isinstance(one, dict):
        same(list(one.items()), list(other.items()))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_equal_and_of_its_type(value):
    same(from_text(to_text(value)), value)
    same(from_parts(to_parts(value)), value)
    json.loads(to_text(value), parse_constant=pytest.fail)


def test_not_a_number_comes_back():
    assert math.isnan(from_text(to_text(math.nan)))


def test_sizes_are_tuples_when_they_come_back():
    same(from_text(to_text((torch.Size([2, 3]),))), ((2, 3),))


TENSORS = [torch.arange(6.0).view(2, 3).t(), torch.tensor([math.nan, -0.0]), torch.zeros(0, 2), torch.tensor(True)]
TENSORS += [torch.tensor([1, -2], dtype=kind) for kind in (torch.int8, torch.int64, torch.float16, torch.bfloat16)]


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_tensors_come_back_in_their_bits(tmp_path):
    named = {str(place): tensor for place, tensor in enumerate(TENSORS)}
    again = from_parts(to_parts({"named": named, "first": TENSORS[0], "none": None}))
    assert list(map(bits, again["named"].values())) == list(map(bits, TENSORS)) and again["none"] is None
    assert bits(again["first"]) == bits(TENSORS[0]) and again["first"].is_contiguous()
    write_safetensors(tmp_path / "tensors", named)
    assert list(map(bits, read_safetensors(tmp_path / "tensors").values())) == list(map(bits, TENSORS))


@dataclass(frozen=True)
class Unknown:
    x: int = 1


class Several(tuple):
    pass


@pytest.mark.parametrize(
    "value",
    [len, object(), {1, 2}, Unknown(), Several((1,)), b"raw", Unknown, torch.zeros(1, dtype=torch.complex64)],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_form_is_refused_by_its_class(value):
    name = "complex64" if isinstance(value, torch.Tensor) else type(value).__name__
    for inside in (value, (value,), {"a": [value]}):
        with pytest.raises(NoFormError, match=name):
            to_parts(inside)
        with pytest.raises(NoFormError):
            to_text(inside)


def test_tensors_are_in_parts_alone():
    with pytest.raises(NoFormError, match="Tensor"):
        to_text(torch.zeros(1))


def test_an_extent_is_of_the_readers_scope():
    scope, other = ExtentScope(), ExtentScope()
    n = scope.symbol("n", 5)
    other.symbol("n", 5)
    text = to_text((2 * n + 1, 3))
    (again, three) = from_text(text, {"Extent": lambda terms: Extent(other, terms)})
    assert again.scope is other and again.terms == (2 * n + 1).terms and three == 3
    with pytest.raises(ValueError, match="'Extent'"):
        from_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"is": "Unknown", "x": 1}',
        '{"is": "TensorAt"}',
        '{"is": "TensorAt", "index": 1, "more": 2}',
        '{"is": "os.system", "value": "true"}',
        '{"is": "dtype", "value": "nn"}',
        '{"is": 3}',
        '{"is": {}}',
        '{"is": "tensor"}',
        '{"is": "tensor", "dtype": "F32", "shape": [2], "begin": 0}',
        '{"is": "tensor", "dtype": "F31", "shape": [], "begin": 0}',
        '{"is": "frozenset", "items": [{}]}',
        '{"is": "float", "value": null}',
    ],
)
def test_texts_that_no_codec_wrote_are_refused(text):
    with pytest.raises(ValueError, match=r"wanted|torch has|Expecting"):
        from_text(text)
    with pytest.raises(ValueError, match=r"wanted|torch has|Expecting"):
        from_parts({"value": text.encode()})
    with pytest.raises(ValueError, match="'value'"):
        from_parts({"text": b"1"})


def test_a_name_is_one_classs():
    with pytest.raises(ValueError, match="TensorAt"):
        written(make_dataclass("TensorAt", ["index"], frozen=True))


PARTS = to_parts({"tensor": torch.arange(5), "text": "x"}) | {"raw": bytes(range(256)), "empty": b""}


def test_a_container_is_whole_in_every_bit_or_it_is_none(tmp_path):
    content = write_artifact("kind", key_of(1), PARTS, "told")
    header, parts = read_artifact(content, "kind", key_of(1))
    assert parts == PARTS and header["note"] == "told" and read_artifact(content)[1] == PARTS
    for at in range(len(content)):
        for damaged in (content[:at], content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]):
            with pytest.raises(DamagedError):
                read_artifact(damaged, "kind", key_of(1))
    for damaged in (content + b"\0", b"bridge artifact0" + content[16:], content[16:]):
        with pytest.raises(DamagedError):
            read_artifact(damaged)
    for kind, key in (("other", key_of(1)), ("kind", key_of(2))):
        with pytest.raises(DamagedError, match="another artifact"):
            read_artifact(content, kind, key)


def test_a_file_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    write_file(tmp_path / "file", b"first")

    def full(self, content):
        with open(self, "wb") as file:
            file.write(content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "file", b"second")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"first")]
