"""Values and messages between the referee and untrusted processes."""

from __future__ import annotations

import math
import time

import pytest
import torch

from dtlab.grading.wire import (
    Hangup,
    Opaque,
    Silence,
    decode,
    encode,
    link_pair,
    tensor_bytes,
    tensor_from,
)


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (0, 4)])
def test_every_tensor_survives(dtype, shape):
    x = (torch.arange(math.prod(shape)) % 2).reshape(shape).to(dtype)
    y = tensor_from(tensor_bytes(x), str(dtype).split(".")[-1], list(shape))
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert tensor_bytes(x) == tensor_bytes(y)


def test_a_tensor_that_is_not_contiguous_arrives_in_order():
    x = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(tensor_from(tensor_bytes(x), "float32", [3, 2]), x)


@pytest.mark.parametrize("value", [
    None, True, 3, -(10**40), 2.5, float("inf"), "text", (1, 2), [1, (2.0, None)], {"a": [1], 2: 3},
])
def test_plain_values_survive(value):
    assert decode(encode(value, []), []) == value


def test_other_objects_become_their_repr():
    class Thing:
        def __repr__(self):
            return "a thing"

    got = decode(encode((Thing(), 1), []), [])
    assert got == ("a thing", 1)
    assert isinstance(got[0], Opaque)


@pytest.mark.parametrize(("data", "dtype", "shape"), [
    (b"abc", "float32", [1]), (b"", "float32", [3]), (b"1234", "Tensor", [1]),
    (b"1234", "float32", [-1]), (b"1234", "nonsense", [1]),
])
def test_pieces_that_fit_no_tensor_are_refused(data, dtype, shape):
    with pytest.raises(ValueError):
        tensor_from(data, dtype, shape)


def test_messages_keep_their_order_and_blobs():
    here, there = link_pair()
    here.send({"do": "a"}, b"x" * 100_000, b"")
    here.send({"do": "b"})
    header, blobs = there.recv()
    assert (header["do"], [len(b) for b in blobs]) == ("a", [100_000, 0])
    assert there.recv()[0]["do"] == "b"


def test_silence_and_hangup_are_told_apart():
    here, there = link_pair()
    with pytest.raises(Silence):
        here.recv(time.monotonic() + 0.01)
    there.close()
    with pytest.raises(Hangup):
        here.recv()


@pytest.mark.parametrize("nonsense", [
    b"\x00" * 7 + b"\x04" + b"null",
    b"\x00" * 7 + b"\x02" + b"{}",
    b"\xff" * 100,
    b"\x00" * 7 + b"\x0c" + b'{"blobs":-1}',
    b"\x00" * 7 + b"\x0e" + b'{"blobs":[-1]}',
])
def test_nonsense_is_a_hangup(nonsense):
    here, there = link_pair()
    there._sock.sendall(nonsense)
    there.close()
    with pytest.raises(Hangup):
        here.recv()
