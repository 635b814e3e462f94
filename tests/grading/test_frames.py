"""Values and frames between the referee and untrusted processes."""

from __future__ import annotations

import math
import sys
import time

import pytest
import torch

from dtlab.grading.frames import (
    MAX_VALUE_BYTES,
    ConnectionClosed,
    FrameTimeout,
    Opaque,
    decode,
    encode,
    frame_socket_pair,
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
    z = torch.tensor([1 + 2j]).conj()  # which is noted, and so is the sign of its .imag
    assert torch.equal(tensor_from(tensor_bytes(z), "complex64", [1]), torch.tensor([1 - 2j]))
    assert torch.equal(tensor_from(tensor_bytes(z.imag), "float32", [1]), torch.tensor([-2.0]))
    one = x.flatten()[::2][:1]  # of stride 2, and contiguous
    assert torch.equal(tensor_from(tensor_bytes(one), "float32", [1]), one)


@pytest.mark.parametrize("value", [
    None, True, 3, -(10**18), 2.5, float("inf"), "text", (1, 2), [1, (2.0, None)], {"a": [1], 2: 3},
    b"", {"a": b"1"},
])
def test_plain_values_survive(value):
    blobs = []
    assert decode(encode(value, blobs), blobs) == value


def test_only_few_bytes_come():
    many, blobs = bytes(MAX_VALUE_BYTES + 1), []
    assert isinstance(decode(encode(many, blobs), blobs), Opaque)
    assert isinstance(decode(["bytes", 0], [many]), Opaque)


def test_nothing_comes_whose_hashes_are_all_one():
    of_one_hash = [k * sys.hash_info.modulus for k in range(100_000)]
    assert len(set(map(hash, decode(encode(of_one_hash, []), [])))) > 99_000
    with pytest.raises(ValueError, match="100000 keys"):
        decode(encode(dict.fromkeys(range(100_000)), []), [])


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
    (b"1", "uint4", [1]), (b"1", "float4_e2m1fn_x2", [1]),  # torch can't compute with these
])
def test_data_that_fits_no_tensor_is_refused(data, dtype, shape):
    with pytest.raises(ValueError):
        tensor_from(data, dtype, shape)


def test_frames_keep_their_order_stream_fields_and_blobs():
    here, there = frame_socket_pair()
    here.send("a", b"x" * 100_000, b"", stream=3, n=[1, None])
    here.send("b")
    assert there.recv()[:4] == ("a", 3, {"n": [1, None]}, [b"x" * 100_000, b""])
    assert there.recv()[:4] == ("b", 0, {}, [])


def test_a_timeout_and_a_closed_connection_are_told_apart():
    here, there = frame_socket_pair()
    with pytest.raises(FrameTimeout):
        here.recv(time.monotonic() + 0.01)
    there.close()
    with pytest.raises(ConnectionClosed):
        here.recv()


@pytest.mark.parametrize("header", [
    b"null", b"{}", b"[]", b'["a",0,{}]', b'["a",0,{},3]', b'["a",0,{},[-1]]', b'[{},0,{},[]]',
    b'["a","0",{},[]]', b'["a",0,[],[]]', b"not JSON", b'["a",0,{},[1e400]]',
])
def test_what_is_no_frame_closes_the_connection(header):
    here, there = frame_socket_pair()
    there._sock.sendall(len(header).to_bytes(8, "big") + header)
    with pytest.raises(ConnectionClosed):
        here.recv()


def test_a_frame_of_an_absurd_length_closes_the_connection():
    here, there = frame_socket_pair()
    there._sock.sendall(b"\xff" * 100)
    with pytest.raises(ConnectionClosed):
        here.recv()
